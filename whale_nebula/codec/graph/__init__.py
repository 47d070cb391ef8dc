"""The codecs' layer that sees tensors: pure TensorFlow functions."""
