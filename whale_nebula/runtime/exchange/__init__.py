"""Exchange of boundary tensors between workers: codecs, statistics, and what is expected to arrive."""
