"""Training on transformers' Trainer, with any reweighting function: the paper's tables as commands.

Behind the commands ``multimax train``, ``sweep``, ``table`` and ``demo``; see docs/experiments.md.
"""
