"""Teacher-guided pretraining inside Megatron-Core."""
