"""The command line. Starting it loads no TensorFlow."""
