"""Sparsemax, entmax and the other functions of the field but MultiMax: weights of rows, one after the other."""
