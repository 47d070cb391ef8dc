"""Private parts of TensorFlow and Keras that this package uses, by subject; each function has a contract test."""
