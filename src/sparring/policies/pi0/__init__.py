"""pi0 checkpoints of Hugging Face's transformers behind the Policy interface."""
