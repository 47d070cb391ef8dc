"""What crosses between workers in a step: boundary tensors, their codecs and statistics, and what is expected."""
