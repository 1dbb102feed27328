"""The student's world: Megatron's own trainer on aligned rows."""
