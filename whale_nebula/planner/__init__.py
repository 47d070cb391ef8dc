"""Find a plan: which cluster runs which part of a program, with how many replicas and micro-batches."""
