"""Heartbeats: the rule with a simulated clock, and the two ends of real pipes."""

from __future__ import annotations

import os

import pytest

from tests.unit.gateway.networks import wait_until
from whale_nebula.launch import heartbeat as heartbeats
from whale_nebula.launch.heartbeat import (
    HeartbeatMonitor,
    HeartbeatSender,
    HeartbeatState,
    ProcessState,
    WorkerStatus,
    encode_status,
    parse_status,
    read_process_state,
    update_heartbeat,
)

TIMEOUT_SECONDS = 30.0


def update_repeatedly(*moments: tuple[bool, str, int], every: float = 1.0) -> HeartbeatState | None:
    """What is known after some moments: was there a beat, the process's state, its CPU time."""
    known: HeartbeatState | None = None
    for beat, state, cpu in moments:
        known = update_heartbeat(known, every, beat, ProcessState(state, cpu))
    return known


def is_frozen(*moments: tuple[bool, str, int], runnable: bool = False) -> bool:
    return heartbeats.is_frozen(update_repeatedly(*moments), lambda: runnable, silence=5.0)


BEAT_SAMPLE = (True, "S", 10)
SILENT_SAMPLE = (False, "S", 10)


class TestFrozenRule:
    def test_worker_is_frozen_after_five_silent_seconds(self) -> None:
        assert not is_frozen(BEAT_SAMPLE, *[SILENT_SAMPLE] * 4)
        assert is_frozen(BEAT_SAMPLE, *[SILENT_SAMPLE] * 5)

    def test_heartbeat_resets_the_silence(self) -> None:
        assert not is_frozen(BEAT_SAMPLE, *[SILENT_SAMPLE] * 4, BEAT_SAMPLE, *[SILENT_SAMPLE] * 4)

    def test_computing_worker_is_not_frozen(self) -> None:
        assert not is_frozen(BEAT_SAMPLE, *[(False, "S", 10 + tick) for tick in range(1, 100)])

    def test_worker_is_frozen_five_seconds_after_it_stops_computing(self) -> None:
        computing = [(False, "R", 10 + tick) for tick in range(1, 10)]
        assert not is_frozen(BEAT_SAMPLE, *computing, *[(False, "S", 19)] * 4)
        assert is_frozen(BEAT_SAMPLE, *computing, *[(False, "S", 19)] * 5)

    def test_cpu_time_of_a_stopped_process_does_not_count(self) -> None:
        assert is_frozen(BEAT_SAMPLE, *[(False, "T", 10 + tick) for tick in range(1, 6)])

    def test_runnable_worker_is_not_frozen(self) -> None:
        assert not is_frozen(BEAT_SAMPLE, *[SILENT_SAMPLE] * 50, runnable=True)

    def test_worker_without_a_heartbeat_yet_is_not_frozen(self) -> None:
        assert update_repeatedly(*[SILENT_SAMPLE] * 50) is None
        assert not is_frozen(*[SILENT_SAMPLE] * 50)


def test_process_state_has_increasing_cpu_time() -> None:
    before = read_process_state(os.getpid())
    assert before is not None
    while (now := read_process_state(os.getpid())) is not None and now.cpu == before.cpu:
        pass
    assert now is not None and now.cpu > before.cpu
    assert read_process_state(2**22 + 1) is None


def test_sender_writes_heartbeats_until_the_pipe_closes() -> None:
    reading, writing = os.pipe()
    thread = HeartbeatSender(writing, every=0.001).thread
    assert not os.get_inheritable(writing)
    assert os.read(reading, 1) == b"."
    os.close(reading)
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive()
    os.close(writing)


def test_sender_survives_a_full_pipe() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while True:
        try:
            os.write(writing, b"." * 4096)
        except BlockingIOError:
            break
    thread = HeartbeatSender(writing, every=0.0).thread
    thread.join(0.05)
    assert thread.is_alive()
    os.close(reading)
    thread.join(TIMEOUT_SECONDS)
    assert not thread.is_alive()
    os.close(writing)


def test_monitor_reports_a_frozen_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    still, alive = os.pipe(), os.pipe()
    beating = HeartbeatSender(alive[1], every=0.002).thread
    os.write(still[1], b".")
    reported: list[str] = []
    monkeypatch.setattr("whale_nebula.launch.heartbeat.read_process_state", lambda pid: ProcessState("S", 1))
    monkeypatch.setattr("whale_nebula.launch.heartbeat.has_runnable_thread", lambda pid: False)
    ward = HeartbeatMonitor(
        {"gpu/0": alive[0], "npu/0": still[0]}, {"gpu/0": 1, "npu/0": 2}, reported.append, silence=0.5
    )
    wait_until(lambda: reported)
    ward.close()
    assert reported == ["npu/0"]
    beating.join(TIMEOUT_SECONDS)
    for fd in (still[1], alive[1]):
        os.close(fd)


def test_sender_announces_the_exit_except_in_a_forked_process() -> None:
    reading, writing = os.pipe()
    sender = HeartbeatSender(writing, every=0.001)
    sender.code, sender.error, sender.cause = 3, "NB-302", "NB-500"
    sender._owner = -1  # as in a process that was forked: it has another number
    sender.announce_exit()
    received, status = os.read(reading, 4096), WorkerStatus()
    parse_status(received, status, 0.0)
    assert status == WorkerStatus()
    sender._owner = os.getpid()
    sender.send(epoch=2)
    sender.send(stepped=True)
    sender.announce_exit()
    while not status.ends:
        received = parse_status(received + os.read(reading, 4096), status, 7.0)
    assert status == WorkerStatus(ends=True, code=3, error="NB-302", cause="NB-500", epoch=2, first_step_at=7.0)
    os.close(reading)
    sender.announce_exit()  # nobody listens any more
    sender.thread.join(TIMEOUT_SECONDS)
    os.close(writing)


def test_ending_worker_may_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, still = os.pipe(), os.pipe()
    os.write(ending[1], b".." + encode_status(ends=True, code=1))
    os.write(still[1], b".")
    reported: list[str] = []
    monkeypatch.setattr("whale_nebula.launch.heartbeat.read_process_state", lambda pid: ProcessState("S", 1))
    monkeypatch.setattr("whale_nebula.launch.heartbeat.has_runnable_thread", lambda pid: False)
    ward = HeartbeatMonitor(
        {"gpu/0": ending[0], "npu/0": still[0]}, {"gpu/0": 1, "npu/0": 2}, reported.append, 0.1, ending=0.4
    )
    wait_until(lambda: len(reported) == 2)
    ward.close()
    assert reported == ["npu/0", "gpu/0"]
    assert ward.statuses == {"gpu/0": WorkerStatus(ends=True, code=1), "npu/0": WorkerStatus()}
    for fd in (ending[1], still[1]):
        os.close(fd)


def test_monitor_reads_pending_messages_at_close_and_ignores_invalid_ones() -> None:
    reading, writing = os.pipe()
    ward = HeartbeatMonitor({"gpu/0": reading}, {"gpu/0": 2**22 + 1}, pytest.fail, silence=TIMEOUT_SECONDS)
    os.write(writing, b'..\n[]\n{"_x":1,"code"\n{"pid":3,"epoch":4}\n' + encode_status(error="NB-401"))
    ward.close()
    assert ward.statuses["gpu/0"] == WorkerStatus(error="NB-401", epoch=4)
    os.close(writing)


def test_monitor_without_workers_can_be_closed() -> None:
    HeartbeatMonitor({}, {}, pytest.fail).close()
