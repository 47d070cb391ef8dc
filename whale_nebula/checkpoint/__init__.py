"""Checkpoints on disk: their folder, their manifest, and the rule for their interval. Loads no TensorFlow."""
