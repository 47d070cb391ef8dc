"""The gateway: the only process of a cluster that other clusters connect to; it relays sealed frames.

It forwards frames unchanged. It is trusted with availability, not with content: payloads are sealed end to end between
workers. It does not need TensorFlow.
"""
