"""What `multimax check` compares and times."""
