"""A gateway: the one process of a cluster that others can reach. It joins workers with those of other clusters.

It hands on frames as they are. It is trusted to be there, and not with what it carries: payloads are sealed from
worker to worker. It needs no TensorFlow.
"""
