"""Checkpoints of a run: what is saved and when, how it is written beside training, and how a run goes on from one."""
