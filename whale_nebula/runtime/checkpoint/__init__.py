"""Checkpoints of a run: what is saved and when, how it is written concurrently with training, and how a run resumes."""
