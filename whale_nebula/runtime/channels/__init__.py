"""How a boundary's tensor crosses where a codec has something to do: one end of one direction of it, and its state."""

from whale_nebula.runtime.channels.channels import Channels, coded
from whale_nebula.runtime.channels.state import ChannelState, States

__all__ = ["ChannelState", "Channels", "States", "coded"]
