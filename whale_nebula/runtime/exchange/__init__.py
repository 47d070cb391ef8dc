"""Exchange of boundary tensors between workers: codecs, statistics, and the admission of expected tensors."""
