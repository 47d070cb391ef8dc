"""The gateway: the one process of a cluster that other clusters reach; it relays sealed frames.

It hands on frames as they are. It is trusted to be there, and not with what it carries: payloads are sealed from
worker to worker. It needs no TensorFlow.
"""
