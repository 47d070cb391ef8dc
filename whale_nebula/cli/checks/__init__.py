"""The checks of `whale-nebula doctor`. None of them loads TensorFlow; those of one machine load no gRPC either."""
