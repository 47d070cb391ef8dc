"""Checkpoints on disk: their folder and their manifest. Loads no TensorFlow."""
