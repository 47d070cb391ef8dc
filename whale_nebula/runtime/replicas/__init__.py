"""Replicas of a stage: all-reduce of gradients, sums over a batch, and the collectives they run on."""
