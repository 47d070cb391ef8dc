"""The models that examples and benchmarks train; installed as `whale_nebula.models`."""
