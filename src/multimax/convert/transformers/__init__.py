"""Models of Hugging Face transformers. This file imports nothing, so that ``import multimax`` does not need them."""
