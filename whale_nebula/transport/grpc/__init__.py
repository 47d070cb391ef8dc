"""Links over gRPC: one bidirectional stream of frames between two workers, and how it is made again."""

from whale_nebula.transport.grpc.knock import Knock
from whale_nebula.transport.grpc.lane import Lane
from whale_nebula.transport.grpc.listener import Listener, Visitor

__all__ = ["Knock", "Lane", "Listener", "Visitor"]
