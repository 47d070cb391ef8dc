"""Fuzzing of control messages.

Valid session messages are mutated: fields left out, values of other types, other kinds. Those that the registry
accepts go to a session that waits for them. The result must be one of this library's errors, or nothing.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from whale_nebula.errors import NebulaError, RemoteProtocolError
from whale_nebula.runtime.local_sgd.step import LeaveRequests
from whale_nebula.runtime.session.rendezvous import _agree_on_config, _agree_on_seed
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.step.distributed import parse_reports
from whale_nebula.transport.memory import MemoryNetwork
from whale_nebula.wire.message import check_message, decode_message

STEP_FIELDS = {
    "program": 1,
    "step": 3,
    "name": "fit",
    "rows": 8,
    "inputs": {"x": 7, "y": [1, None]},
    "pace": {"once": 0.5},
}
STEP = {**STEP_FIELDS, "stays": False, "leaving": None, "seen": {"stages": {"a": [0.1, 0.2, 1, "gpu"]}, "links": {}}}
HELLO = {"whale_nebula": "1", "tensorflow": "2", "keras": "3", "host": "h", "seed": 1, "results": "x"}
ACTION = {"doing": "step 3 of 'fit'", "line": "train.py:7"}
VALID_MESSAGES: Mapping[str, dict[str, Any]] = {
    "HELLO": {**HELLO, **ACTION},
    "AGREE": {"program": "fit", "digest": "ab", "states": {"b0": 1}, **ACTION},
    "LINES": {"program": "fit", "lines": ["%0 = input"], **ACTION},
    "STEP": {**STEP, "mark": 0, "alike": {"gpu/0, gpu/1": 5}, "settings": {"rate": "0.1"}, **ACTION},
    "VOTE": {"why": "", "doing": "phase 0 of step 3 of 'fit'", "line": "train.py:7"},
    "MEET": {"able": True, "address": "127.0.0.1:1", "seeds": [[1, 2]], "weights": 5, **ACTION},
}
INVALID_VALUES = (
    None,
    True,
    -1,
    2**70,
    10**400,
    1.5,
    1e308,
    "",
    "\ud800",
    "x" * 300,
    [],
    {},
    [None],
    {"a": []},
    [[1]],
    {"": None},
)


def mutate_message(draw: random.Random) -> dict[str, Any]:
    """A valid message, changed in a few places."""
    about = draw.choice(list(VALID_MESSAGES))
    message: dict[str, Any] = {"kind": "SESSION", "about": about, **copy.deepcopy(VALID_MESSAGES[about])}
    for _ in range(draw.randint(0, 3)):
        name = draw.choice([*message, "other"])
        if draw.random() < 0.3:
            message.pop(name, None)
        else:
            message[name] = draw.choice(INVALID_VALUES)
    return message


def list_receivers(session: Session) -> list[Callable[[], object]]:
    """All calls that receive a session message of a peer."""
    return [
        lambda: _exchange_hello(session),
        lambda: session.agree("fit", "ab", ["%0 = input"], lambda ours, theirs: str(theirs[:1])),
        lambda: parse_reports(session.check_step(STEP_FIELDS).values()),
        lambda: session.vote("fit", 3, 0, ""),
        lambda: session.meet("a read"),
        lambda: session.exchange("step 3 of 'fit'", {"able": True, "address": None}, session.links),
        lambda: LeaveRequests(session.worker, session.links).receive(),
    ]


def _exchange_hello(session: Session) -> None:
    own = {**HELLO, "weights": "own", "inputs": {}}  # of the same versions, otherwise it ends here
    replies = session.hello(own)
    _agree_on_seed(session.worker, 1, replies)
    _agree_on_config(session.worker, own, replies)


def receive_message(message: dict[str, Any], receiver: int) -> str:
    """Deliver a message: "refused" by the registry, "told" as one of this library's errors, or "taken"."""
    network = MemoryNetwork()
    here, there = network.link("gpu/0", "npu/0", "gpu", "npu"), network.link("npu/0", "gpu/0", "npu", "gpu")
    try:
        message = decode_message(json.dumps(message).encode())
        check_message(message)
    except RemoteProtocolError:
        return "refused"
    there._outbox.put_message(message)
    try:
        list_receivers(Session("gpu/0", {"npu/0": here}, 0.0))[receiver]()
    except NebulaError:
        return "told"
    return "taken"


def run(seed: int, count: int) -> dict[str, int]:
    """Deliver this many messages; any other error is raised with the message that caused it."""
    draw, counts = random.Random(seed), Counter[str]()
    for _ in range(count):
        message = mutate_message(draw)
        for receiver in range(7):
            try:
                counts[receive_message(copy.deepcopy(message), receiver)] += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}: {message!r} to receiver {receiver}: {error!r}") from error
    return dict(counts)
