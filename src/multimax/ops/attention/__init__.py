"""Scaled dot-product attention with MultiMax instead of softmax."""
