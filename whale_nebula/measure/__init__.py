"""Measure this machine: kernels, calls, memory, codecs, and collectives between processes of it."""
