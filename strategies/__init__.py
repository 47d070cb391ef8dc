"""Functions from (model, clusters) to a map for `nb.place`; installed as `whale_nebula.strategies`."""
