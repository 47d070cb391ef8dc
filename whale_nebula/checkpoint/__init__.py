"""Checkpoints on disk: their folder, their manifest, and the rule that says when there is one. Loads no TensorFlow."""
