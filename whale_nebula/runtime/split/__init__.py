"""Tensor parallelism: ops are recreated on shards, with collectives between them."""
