"""Tensor parallelism: ops are made again on shards, with collectives between them."""
