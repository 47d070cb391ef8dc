"""The dialling side of a gRPC carrier: connect, diagnose refusals, and retry."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc

from whale_nebula.errors import DeadlineError, ExpiredError, IdentityError, LinkClosedError, NebulaError, TransportError
from whale_nebula.security import Credentials, CurrentCredentials, Identity, Peer, Prover, check_live, diagnose
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.carrier import GrpcCarrier
from whale_nebula.transport.grpc.connection import Connection, Lane, describe_error
from whale_nebula.transport.grpc.listener import LANES, METHOD, TROUBLE, StreamRequest, check_proof
from whale_nebula.transport.grpc.options import make_channel_credentials, probe_address

_LOG = logging.getLogger("whale_nebula.transport")
_MAX_TROUBLE_LENGTH = 300
_FINAL_CODES = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


class Target(NamedTuple):
    """The address to dial, the identity expected there, and the credentials of this side.

    Without `credentials` nothing is encrypted or authenticated. `gateway`: the address is that of a gateway, so that a
    refusal does not mean that the worker is dead.
    """

    address: str
    identity: Identity | None = None
    credentials: CurrentCredentials | None = None
    gateway: bool = False

    @classmethod
    def for_peer(
        cls, run: str, name: str, address: str, current: CurrentCredentials | None, *, gateway: bool = False
    ) -> Target:
        """The target of worker or gateway `name` ("gpu/0", "gpu/gateway") at an address."""
        return cls(address, None if current is None else Identity.of_worker(run, name), current, gateway)

    def diagnose(self) -> NebulaError | None:
        """The reason why no stream can be opened to the address; None if a retry may succeed."""
        diagnosis = diagnose.probe(self.address, self.credentials() if self.credentials else None, self.identity)
        return None if diagnosis is None or diagnosis.kind == "unreachable" else diagnosis.error

    def check_answer(self, request: StreamRequest, answer: Mapping[str, Any]) -> Peer | None:
        """The certificate of a gateway, authenticated by its answer; raises an `IdentityError` if it is not."""
        if not self.gateway or self.credentials is None or self.identity is None:
            return None
        return check_proof(Prover(self.credentials), request, answer, self.identity)


def dial(
    target: Target,
    request: StreamRequest,
    lane: Lane,
    receive: Callable[[bytes], None],
    *,
    deadlines: Deadlines,
    rate: float | None = None,
    credentials: Credentials | None = None,
) -> int:
    """Open one stream, which a thread reads; returns the number of lanes that the other side requests.

    If the accepting side reports that the path beyond it is closed, the reason is in the lane's `trouble`. Raises
    `TransportError` for a transient error, and another NebulaError for a refusal.
    """
    used_credentials = credentials or (target.credentials() if target.credentials else None)
    channel_options = options.make_client_options(
        deadlines, rate, name=target.identity.dns if used_credentials and target.identity else None
    )
    channel = (
        grpc.insecure_channel(target.address, channel_options)
        if used_credentials is None
        else grpc.secure_channel(target.address, make_channel_credentials(used_credentials), channel_options)
    )
    call = channel.stream_stream(METHOD)(lane.yield_frames(), metadata=request.metadata())
    lane.attach_stream(lambda why: call.cancel())
    answer: dict[str, Any] = {}
    answered = threading.Event()
    proof_errors: list[NebulaError] = []

    def run() -> None:
        try:
            answer.update(call.initial_metadata() or ())
            if LANES in answer:
                lane.certified_peer = target.check_answer(request, answer)
        except Exception as error:  # of any kind: the peer is not authenticated
            proof_error = (
                error
                if isinstance(error, NebulaError)
                else TransportError("cannot verify the peer", why=describe_error(error))
            )
            proof_errors.append(proof_error)
            lane.end(proof_error.what)
        finally:
            answered.set()
        if LANES in answer:
            lane.read(call, receive)
            channel.close()

    threading.Thread(target=run, name="nebula-receive", daemon=True).start()
    if not answered.wait(deadlines.connect):
        lane.end(f"{target.address} did not answer within {deadlines.connect:g} s")
        channel.close()
        raise TransportError(lane.reason)
    if proof_errors:
        raise proof_errors[0]
    if LANES not in answer:
        error = _refusal(target, call, lane, deadlines.connect)
        channel.close()
        raise error
    trouble = unquote(str(answer.get(TROUBLE, "")))[:_MAX_TROUBLE_LENGTH]
    lane.trouble = trouble if trouble.isprintable() else ""
    requested_lanes = str(answer[LANES])
    return min(int(requested_lanes), options.LANES_WITHOUT_BBR) if re.fullmatch("[0-9]{1,4}", requested_lanes) else 1


def _refusal(target: Target, call: Any, lane: Lane, seconds: float) -> NebulaError:
    """The reason why a stream was not established, from gRPC's error. A foreign server that answers without refusing
    gets some time.
    """
    try:
        call.exception(timeout=seconds)
    except grpc.FutureTimeoutError:
        lane.end("its answer is not that of a worker")
        return IdentityError(f"the process at {target.address} is not a worker", why=lane.reason)
    except grpc.FutureCancelledError:
        pass  # its own reason is in the call's code
    code, why = call.code(), describe_error(call)
    lane.end(why)
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return IdentityError(f"the process at {target.address} is not a worker", why=why)
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return LinkClosedError(why)
    if code in _FINAL_CODES:
        mend = "fix the reason above; for a certificate, run whale-nebula doctor --config clusters.yaml on both sides"
        return IdentityError(f"{target.address} refuses this worker: {why}", mend=mend)
    return TransportError(f"cannot connect to {target.address}", why=why)


class DiallingCarrier(GrpcCarrier):
    """Carrier that dials the other worker, or the gateway in front of it, and reconnects whenever the connection
    breaks.
    """

    def __init__(self, run: str, here: str, there: str, target: Target, *, deadlines: Deadlines) -> None:
        super().__init__(here, there, target.address, deadlines)
        self._run_id = run
        self._target = target
        self._uses_gateway = bool(target.gateway)
        self._last_diagnosis: type[object] | None = None

    def _maintain_connection(self) -> None:
        attempt = 0
        while not self._closed:
            trouble: TransportError | None = None
            try:
                attempt = 0 if self._run_connection() else attempt + 1
            except ExpiredError as error:  # of the gateway's certificate: it may be renewed
                self._refusal, self._trouble = error, self._name_gateway(error.what)
                attempt += 1
            except (IdentityError, LinkClosedError):
                raise
            except TransportError as error:
                trouble = error
            if trouble is not None and not self._closed:
                self._diagnose_failure(trouble)  # its error is raised as it is
                attempt += 1
            if not self._wait(self._deadlines.draw_retry_pause(attempt)):
                return

    def _run_connection(self) -> bool:
        """Connect, and return once the connection is over; returns whether the greeting was completed on it."""
        current = self._target.credentials
        credentials = current() if current else None
        connection = Connection(secrets.token_hex(8))
        try:
            lane, requested_lanes = self._open(connection, 0, credentials)
        except BaseException:
            connection.end("it was not opened")  # a thread that reads it must not wait forever
            raise
        lanes = max(options.count_lanes(), requested_lanes)
        if not connection.is_over:
            self._adopt(connection, self._name_gateway(lane.trouble) if lane.trouble else "")
        has_all_lanes = False
        while (
            not connection.wait_for_end(self._deadlines.check_interval if has_all_lanes else 0.05) and not self._closed
        ):
            if not has_all_lanes and connection.opened.is_set() and not connection.is_over:
                self._open_further_lanes(connection, lanes, credentials)
                has_all_lanes = True
            if current is None:
                continue
            if current() is not credentials:
                connection.end("this side's certificate was renewed")
            if lane.certified_peer is not None:  # the gateway's certificate may have expired or been revoked meanwhile
                try:
                    check_live(current().trust, lane.certified_peer)
                except IdentityError as error:
                    connection.end(error.what)
        return connection.was_greeted

    def _open(self, connection: Connection, number: int, credentials: Credentials | None) -> tuple[Lane, int]:
        request = StreamRequest(self._run_id, self.here, self.there, connection.name, number)
        lane = Lane(connection.room)
        connection.hold_reading(number, lane)
        self._opening = lane
        if self._closed:
            lane.end("closed")
        receive = partial(self._receive, connection)
        requested_lanes = dial(
            self._target, request, lane, receive, deadlines=self._deadlines, rate=self._rate, credentials=credentials
        )
        self._opening = None
        connection.add(number, lane)
        return lane, requested_lanes

    def _open_further_lanes(self, connection: Connection, lanes: int, credentials: Credentials | None) -> None:
        try:
            for number in range(1, lanes):
                self._open(connection, number, credentials)
        except NebulaError as error:
            _LOG.info("%s to %s continues with fewer lanes: %s", self.here, self.there, describe_error(error))

    def _diagnose_failure(self, error: TransportError) -> None:
        """Diagnose a failed connection: not up yet, dead, or a permanent error, which is raised."""
        probe = probe_address(self.where, self._deadlines.connect)
        self._trouble = self._name_gateway(probe.why or error.why or error.what)
        self._refusal = None
        _LOG.debug("%s cannot reach %s: %s", self.here, self.there, self._trouble)
        if probe.outcome == "refused":
            worker_death = self._count_refusal()
            if worker_death is not None and not self._target.gateway:
                raise worker_death
            grace = self._deadlines.gateway_grace
            if self._target.gateway and self._connections and time.monotonic() - self._changed_at > grace:
                raise DeadlineError(
                    f"the gateway at {self.where} has refused connections for {grace:g} s",
                    where=self.where,
                    why=f"it is the only route from '{self.here}' to '{self.there}', and its process has exited",
                    mend="restart it: whale-nebula gateway",
                )
            return
        self._refusals = 0
        diagnosed = self._target.diagnose() if probe.outcome == "open" else None
        if isinstance(diagnosed, ExpiredError):
            self._refusal = diagnosed  # it may be renewed: the link waits for that until its patience is over
        elif diagnosed is not None and type(diagnosed) is self._last_diagnosis:  # twice: not a partial copy of files
            raise diagnosed
        self._last_diagnosis = type(diagnosed)
        self._trouble = self._name_gateway(diagnosed.what) if diagnosed else self._trouble

    def _name_gateway(self, trouble: str) -> str:
        """The diagnosis with the hop that it concerns: a gateway is not the awaited worker."""
        return f"it is reached through the gateway: {trouble}" if self._target.gateway else trouble
