"""Train one TensorFlow model across clusters that share a slow line."""
