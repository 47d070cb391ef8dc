"""Inputs of a step: micro-batches, rows of a shard, rows that are absent, and fingerprints."""
