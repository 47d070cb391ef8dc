"""Where TensorFlow runs: fragments become functions, and a step is run by instructions."""
