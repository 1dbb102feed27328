"""Models of Hugging Face inside Megatron."""
