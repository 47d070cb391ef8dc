"""Execute a plan: steps, boundary tensors, variables, replicas, the session of a run, local SGD."""
