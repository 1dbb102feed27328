"""The plain PyTorch trainer, for any Hugging Face student and method."""
