"""The plain PyTorch trainer: any Hugging Face student, any method, one process or many."""
