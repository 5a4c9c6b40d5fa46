"""Models of Hugging Face transformers. This file imports nothing: ``import multimax`` does not need transformers."""
