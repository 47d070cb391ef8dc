"""Everything that is private in TensorFlow and Keras, by subject; each part has a contract test."""
