"""Program and Plan as pure data: what is computed, and where. Imports neither TensorFlow nor anything that runs."""
