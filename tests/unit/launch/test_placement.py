"""The addresses and ports of this machine; free ports, distinct for all processes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from whale_nebula.errors import ConfigError
from whale_nebula.launch import placement
from whale_nebula.launch.placement import ANY, Placement, assign_ports, find_listen_addresses, is_local


def test_is_local_recognises_addresses_of_this_host() -> None:
    own = ["127.0.0.1", "127.9.9.9", "localhost", socket.gethostname()]
    assert [is_local(host) for host in own] == [True] * 4
    assert [is_local(host) for host in ("192.0.2.1", "2001:db8::1", "other.example", "")] == [False] * 4


def test_settle_ports_gives_each_worker_a_distinct_port() -> None:
    workers = {f"gpu/{number}": ANY for number in range(50)}
    found = assign_ports(Placement(tuple(workers), {**workers, "npu/0": "10.77.0.2:7101"}))
    assert found.addresses["npu/0"] == "10.77.0.2:7101"
    ports = {address for worker, address in found.addresses.items() if worker != "npu/0"}
    assert len(ports) == 50
    assert all(address.startswith("127.0.0.1:") and not address.endswith(":0") for address in ports)


def test_port_in_use_is_refused_before_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"worker gpu/0 cannot listen at .*: Address already") as refused:
            find_listen_addresses(Placement(("gpu/0",), {"gpu/0": address, "npu/0": "192.0.2.1:1"}))
    assert "a different port" in refused.value.mend
    assert find_listen_addresses(Placement(("gpu/0",), {"gpu/0": address})) == {"gpu/0": address}


def test_foreign_address_listens_on_all_interfaces() -> None:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        port = trial.getsockname()[1]
    assert find_listen_addresses(Placement(("gpu/0",), {"gpu/0": f"192.0.2.1:{port}"})) == {"gpu/0": f"0.0.0.0:{port}"}


def test_unresolved_platform_host_name_is_accepted() -> None:
    address = "no-such-host.invalid:7101"
    assert find_listen_addresses(Placement(("gpu/0",), {"gpu/0": address})) == {"gpu/0": address}


def test_unresolved_configured_host_name_is_refused() -> None:
    address = "no-such-host.invalid:7101"
    with pytest.raises(ConfigError, match=r"'no-such-host\.invalid' does not resolve on this host") as refused:
        find_listen_addresses(Placement(("gpu/0",), {"gpu/0": address}), is_configured=True)
    assert "replace no-such-host.invalid" in refused.value.mend


PRINT_FREE_PORT = (
    "import sys; from whale_nebula.launch import placement; print(placement.free_port(), flush=True); sys.stdin.read()"
)


def test_free_ports_are_distinct_across_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = f"from whale_nebula.launch import placement; placement._COUNT = 8; {PRINT_FREE_PORT}"
    command = [sys.executable, "-c", asking]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        given = [int(each.stdout.readline()) for each in others if each.stdout is not None]
        monkeypatch.setattr(placement, "_COUNT", 8)
        given += [placement.free_port() for _ in range(3)]
    finally:
        for each in others:
            each.communicate(timeout=60)
    assert len(set(given)) == len(given) == 6


def test_free_port_can_be_bound() -> None:
    with socket.create_server(("127.0.0.1", placement.free_port())) as server:
        assert placement.free_port() != server.getsockname()[1]
