"""Reachability of a port: by the kernel where possible, otherwise by its rules."""

import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Sequence

import pytest

from whale_nebula.launch.placement import free_port
from whale_nebula.runtime.session.task import Rule, build_filter, find_local_address, restrict_connections

NETWORKS = ["127.0.0.0/8", "::1/128", "192.0.2.7", "2001:db8::5"]


def accepts_packet(program: Sequence[Rule], source: str) -> bool:
    """Run a program of the packet filter on a packet of which only the source matters."""
    address = ipaddress.ip_address(source)
    before = b"\x45" + bytes(11) if address.version == 4 else b"\x60" + bytes(7)
    packet, held, at = before + address.packed + bytes(32), 0, 0
    while True:
        code, yes, no, value = program[at]
        offset, at = value - 0xFFF00000, at + 1
        if code == 0x30:
            held = packet[offset]
        elif code == 0x20:
            (held,) = struct.unpack_from("!I", packet, offset)
        elif code == 0x54:
            held &= value
        elif code == 0x15:
            at += yes if held == value else no
        else:
            assert code == 0x06
            return value != 0


@pytest.mark.parametrize("source", ["127.0.0.1", "127.8.9.1", "::1", "192.0.2.7", "2001:db8::5"])
def test_filter_accepts_admitted_addresses(source: str) -> None:
    assert accepts_packet(build_filter([ipaddress.ip_network(each) for each in NETWORKS]), source)


@pytest.mark.parametrize("source", ["192.0.2.8", "128.0.0.1", "::2", "2001:db8::6", "2001:db9::5"])
def test_filter_drops_other_addresses(source: str) -> None:
    assert not accepts_packet(build_filter([ipaddress.ip_network(each) for each in NETWORKS]), source)


def test_admitted_address_connects_to_the_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if not restrict_connections(listener.getsockname()[1], ["192.0.2.7"]):
            pytest.skip("this kernel takes no filter")
        with socket.create_connection(listener.getsockname(), timeout=10):
            listener.settimeout(10)
            listener.accept()[0].close()


def test_other_address_is_not_answered() -> None:
    own = find_local_address("192.0.2.1") if has_route() else None
    if own is None or own.startswith("127."):
        pytest.skip("this machine has no address but its own")
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        if not restrict_connections(port, []):
            pytest.skip("this kernel takes no filter")
        with pytest.raises(TimeoutError):
            socket.create_connection((own, port), timeout=0.3)


@pytest.mark.parametrize("accepted", [True, False])
def test_earlier_connection_of_another_address_is_closed(accepted: bool) -> None:
    """A stranger who was faster than the filter; where it is not accepted yet, the server does so meanwhile."""
    own = find_local_address("192.0.2.1") if has_route() else None
    if own is None or own.startswith("127."):
        pytest.skip("this machine has no address but its own")
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port, held = listener.getsockname()[1], []
        with socket.create_connection((own, port)) as stranger, socket.create_connection(("127.0.0.1", port)) as mate:
            server = threading.Thread(target=lambda: held.extend(listener.accept()[0] for _ in range(2)))
            if accepted:
                server.start()
                server.join(10)
            else:
                threading.Timer(0.05, server.start).start()
            if not restrict_connections(port, []):
                pytest.skip("this kernel takes no filter")
            stranger.settimeout(10)
            assert stranger.recv(1) == b""
            mate.sendall(b"x")
            (kept,) = (each for each in held if each.getpeername()[0] == "127.0.0.1")
            kept.settimeout(10)
            assert kept.recv(1) == b"x"
            for each in held:
                each.close()


def test_sockets_that_another_thread_closes_meanwhile_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    duplicate, other = os.dup, socket.create_server(("127.0.0.1", 0))

    def close_first(fd: int) -> int:
        if fd == other.fileno():
            other.close()
        return duplicate(fd)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        able = restrict_connections(listener.getsockname()[1], [])
        monkeypatch.setattr(os, "dup", close_first)
        assert restrict_connections(listener.getsockname()[1], []) == able
    assert other.fileno() == -1


def has_route() -> bool:
    try:
        return bool(find_local_address("192.0.2.1"))
    except OSError:
        return False


def test_port_without_a_listener_or_host_name_is_not_filtered() -> None:
    assert not restrict_connections(free_port(), [])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not restrict_connections(listener.getsockname()[1], ["a-name"])
