"""Give an existing model a new tokenizer; measure how well one model drafts for another."""
