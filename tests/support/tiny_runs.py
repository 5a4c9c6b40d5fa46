"""Options of `multimax train` and `sweep` for runs of two steps."""

TINY = ["--quiet", "--no-tensorboard", "--measured", "8", "--steps", "2", "--batch-size", "4"]
TINY += ["--set", "model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
TINY += ["model.intermediate_size=16", "trainer.eval_steps=2", "trainer.save_steps=2"]
