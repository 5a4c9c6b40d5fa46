"""Sparsemax, entmax15 and entmax."""
