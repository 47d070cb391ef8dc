"""Reports of steps: what was measured, as records, text, files and live displays. Imports no TensorFlow."""
