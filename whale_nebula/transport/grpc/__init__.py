"""Links over gRPC: one bidirectional stream of frames between two workers, with reconnection."""

from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.listener import Knock, Listener, Visitor

__all__ = ["Knock", "Lane", "Listener", "Visitor"]
