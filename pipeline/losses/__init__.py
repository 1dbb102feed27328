"""A student's losses and divergences per token, without logits of the whole vocabulary (torch)."""
