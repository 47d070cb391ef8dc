"""Liveness checks of a silent worker by its gateway, which distinguishes a dead process from an unreachable host.

A live worker reconnects within seconds. If a port refuses twice, its process no longer exists; if a host does not
answer twice, it is frozen or unreachable. A frozen process on a live host is detected by its launcher, which can see
whether the process makes progress, and kills it if not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2

from whale_nebula.errors import NebulaError
from whale_nebula.transport.grpc.limits import Buckets
from whale_nebula.transport.grpc.listener import Dialler, read_dialler
from whale_nebula.transport.grpc.options import REFUSALS_OF_DEAD_PROCESS, REFUSED_TWICE, Probe, probe_address

State: TypeAlias = Literal["dead", "frozen"]
_PROMPT_SECONDS = 0.1  # within which a live worker has usually dialled again
_BETWEEN_SECONDS = 0.2
_ANSWER_SECONDS = 1.0
_MAX_PROBES = 20

_EXPLANATIONS: dict[State, str] = {
    "dead": REFUSED_TWICE,
    "frozen": "did not answer twice: its host is frozen or unreachable",
}


def judge_probes(outcomes: Sequence[str]) -> State | None:
    """The result of the last two probes, if they agree.

    >>> judge_probes(["refused"]), judge_probes(["open", "refused", "refused"]), judge_probes(["silent", "unknown"])
    (None, 'dead', 'frozen')
    """
    last = outcomes[-REFUSALS_OF_DEAD_PROCESS:]
    refusals = last.count("refused")
    if len(last) < REFUSALS_OF_DEAD_PROCESS or "open" in last or 0 < refusals < len(last):
        return None
    return "dead" if refusals else "frozen"


class Liveness:
    """Probes workers of this cluster, each in at most one thread at a time, and reports their state.

    `is_active` returns whether frames arrive (again) from a worker; `report(worker, state, why)` is called once a
    worker is found dead or frozen. A result counts only if the address was open before: an address behind a firewall
    refuses every probe.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        is_active: Callable[[str], bool],
        report: Callable[[str, State, str], None],
        *,
        probe: Callable[[str, float], Probe] = probe_address,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._addresses, self._is_active, self._report = addresses, is_active, report
        self._probe, self._sleep = probe, sleep
        self._lock = threading.Lock()
        self._reachable: set[str] = set()
        self._next_probes: dict[str, Callable[[str], None] | None] = {}  # the probe to run after the current one

    def check_new(self, worker: str) -> None:
        """Check whether the port of a newly connected worker is reachable from here."""
        if worker in self._addresses and worker not in self._reachable:
            self._start(worker, self._probe_new)

    def check_ended(self, worker: str) -> None:
        """Check whether a worker whose stream has ended reconnects."""
        if worker in self._reachable:
            self._start(worker, self._probe_until_back)

    def check_silent(self, worker: str) -> None:
        """Probe a worker whose stream is open but silent."""
        if worker in self._reachable:
            self._start(worker, self._probe_silent)

    def _start(self, worker: str, run: Callable[[str], None]) -> None:
        """Start a probe or, if one is running, another one after it, as that may have missed later changes."""
        with self._lock:
            is_probing = worker in self._next_probes
            self._next_probes[worker] = run
        if not is_probing:
            threading.Thread(
                target=self._run_probes, args=(worker,), name=f"nebula-liveness-{worker}", daemon=True
            ).start()

    def _run_probes(self, worker: str) -> None:
        try:
            while True:
                with self._lock:
                    run, self._next_probes[worker] = self._next_probes[worker], None
                    if run is None:
                        del self._next_probes[worker]
                        return
                run(worker)
        except BaseException:
            with self._lock:
                self._next_probes.pop(worker, None)
            raise

    def _probe_new(self, worker: str) -> None:
        if self._probe_worker(worker) == "open":
            self._reachable.add(worker)
        if not self._is_active(worker):
            self._probe_until_back(worker)

    def _probe_until_back(self, worker: str) -> None:
        self._sleep(_PROMPT_SECONDS)
        outcomes: list[str] = []
        while len(outcomes) < _MAX_PROBES and worker in self._reachable and not self._is_active(worker):
            outcomes.append(self._probe_worker(worker))
            if self._judge(worker, outcomes, "its stream has ended"):
                return
            self._sleep(_BETWEEN_SECONDS)

    def _probe_silent(self, worker: str) -> None:
        outcomes = [self._probe_worker(worker)]
        if outcomes != ["open"]:
            self._sleep(_BETWEEN_SECONDS)
            self._judge(worker, [*outcomes, self._probe_worker(worker)], "it sent no messages")

    def _probe_worker(self, worker: str) -> str:
        return self._probe(self._addresses[worker], _ANSWER_SECONDS).outcome

    def _judge(self, worker: str, outcomes: Sequence[str], before: str) -> bool:
        state = judge_probes(outcomes)
        if state is None or self._is_active(worker):
            return False
        self._reachable.discard(worker)
        self._report(worker, state, f"{before}, and {self._addresses[worker]} {_EXPLANATIONS[state]}")
        return True


_BURST, _A_SECOND = 60, 2.0
SERVICE = "grpc.health.v1.Health"


class Health:
    """gRPC health service; callers are checked first (`admit` raises). The service "" is the gateway, "npu" its route
    to cluster npu.

    It answers only `Check`, `_BURST` times at once and then `_A_SECOND` for each caller: a `Watch` never ends, and
    enough of them would exhaust the server's threads.
    """

    def __init__(self, admit: Callable[[Dialler], None]) -> None:
        self._admit = admit
        self._buckets = Buckets(_BURST, _A_SECOND)
        self._servicer = health.HealthServicer(experimental_non_blocking=False)

    @property
    def handler(self) -> Any:
        """The gRPC handler for a listener."""
        check = grpc.unary_unary_rpc_method_handler(
            self._check_rate(self._servicer.Check),
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Check": check})

    def set_status(self, service: str, serving: bool) -> None:
        """Set the status of a service."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        self._servicer.set(service, status.SERVING if serving else status.NOT_SERVING)

    def close(self) -> None:
        """Report all services as not serving."""
        self._servicer.enter_graceful_shutdown()

    def _check_rate(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def serve(request: Any, context: Any) -> Any:
            dialler = read_dialler(context)
            if not self._buckets.take(dialler.names[0] if dialler.names else dialler.host)[1]:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests to the health service")
            try:
                self._admit(dialler)
            except NebulaError as error:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, error.what)
            return method(request, context)

        return serve
