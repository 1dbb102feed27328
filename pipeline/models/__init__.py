"""A model's files, weights and tokenizer, for students, teachers and evaluation."""
