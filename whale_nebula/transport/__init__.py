"""Links between workers: one protocol over carriers (memory with emulated WAN links, gRPC)."""

from whale_nebula.transport.base import Link
from whale_nebula.transport.memory import MemoryLink, MemoryNetwork
from whale_nebula.transport.protocol import Key, KeyKind, LinkTotals, Packed, Payload

__all__ = ["Key", "KeyKind", "Link", "LinkTotals", "MemoryLink", "MemoryNetwork", "Packed", "Payload"]
