"""The gateway: the one process of a cluster that other clusters reach; it relays sealed frames.

It forwards frames unchanged. It is trusted with availability, not with content: payloads are sealed from worker to
worker. It needs no TensorFlow.
"""
