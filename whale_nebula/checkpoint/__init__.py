"""Checkpoints on disk: their folder, their manifest, and the rule that decides when one is saved. Loads no TensorFlow."""
