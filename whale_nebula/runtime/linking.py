"""The links of a process to all others, as its launcher has prepared them: sockets that it was given, or addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from whale_nebula import __version__
from whale_nebula.config import Config
from whale_nebula.launch.attach import Attachment
from whale_nebula.launch.identity import SecurityFiles
from whale_nebula.runtime.expected import Expected
from whale_nebula.transport import Link, SocketLink


class Joined(NamedTuple):
    """Links by the worker at their other end, and what closes them all, where that is not each for itself."""

    links: Mapping[str, Link]
    close: Callable[[], None] | None = None


def join_links(attachment: Attachment, expected: Expected, config: Config) -> Joined:
    """Open every link; what comes over one must be `expected`."""
    if attachment.addresses:
        return _over_the_network(attachment, expected, config)
    links = {
        peer: SocketLink(
            sock, attachment.worker, peer, attachment.workers, expect=expected, patience=config.patience
        )
        for peer, sock in attachment.sockets.items()
    }
    return Joined(links)


def _over_the_network(attachment: Attachment, expected: Expected, config: Config) -> Joined:
    from whale_nebula.security import Credentials
    from whale_nebula.transport.deadlines import Deadlines
    from whale_nebula.transport.grpc.links import GrpcLinks, Place

    security = attachment.security
    place = Place(
        run=attachment.run_id,
        here=attachment.worker,
        peers={peer: attachment.addresses.get(peer) for peer in attachment.peers},
        listen=attachment.listen,
        gateway=attachment.gateway,
        credentials=None if security is None else Credentials.load(*_paths(security)),
    )
    joined = GrpcLinks(
        place,
        expect=expected,
        deadlines=Deadlines(patience=config.patience, gateway_grace=config.gateway_grace),
        versions={"whale_nebula": __version__},
    )
    return Joined(joined.links, joined.close)


def _paths(files: SecurityFiles) -> tuple[str, str, str, str | None]:
    return files.ca, files.cert, files.key, files.revoked
