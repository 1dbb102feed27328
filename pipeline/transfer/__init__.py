"""Another tokenizer for a model that exists, and how well one model drafts for another."""
