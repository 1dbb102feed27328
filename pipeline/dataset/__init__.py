"""Write and read datasets of aligned documents, verified.

Import single files: reading needs no tokenizer.
"""
