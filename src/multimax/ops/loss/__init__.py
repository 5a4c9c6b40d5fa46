"""Cross-entropy with MultiMax instead of softmax, of logits or of a linear layer that makes them."""
