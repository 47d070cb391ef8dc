"""Checkpoints on disk: their folder and their manifest. Loads TensorFlow only for remote file systems."""
