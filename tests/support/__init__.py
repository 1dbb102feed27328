"""What tests share: corpora, datasets, tokenizers, slow references."""
