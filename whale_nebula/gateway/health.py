"""gRPC's health service on the gateway's port, for everybody whose certificate is good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from whale_nebula.errors import NebulaError
from whale_nebula.transport.grpc.limits import Buckets
from whale_nebula.transport.grpc.listener import Visitor, visitor

_BURST, _A_SECOND = 60, 2.0
SERVICE = "grpc.health.v1.Health"


class Health:
    """Who asks is looked at first (`admit` raises). The service "" is the gateway, "npu" its way to cluster npu.

    It answers `Check` alone, `_BURST` times at once and then `_A_SECOND` for each who asks: a `Watch` never ends, and
    whoever opened enough of them would keep everybody else out.
    """

    def __init__(self, admit: Callable[[Visitor], None]) -> None:
        self._admit = admit
        self._asked = Buckets(_BURST, _A_SECOND)
        self._servicer = health.HealthServicer(experimental_non_blocking=False)

    @property
    def handler(self) -> Any:
        """What a listener serves."""
        check = grpc.unary_unary_rpc_method_handler(
            self._checked(self._servicer.Check),
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Check": check})

    def say(self, service: str, serving: bool) -> None:
        """How a service stands."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        self._servicer.set(service, status.SERVING if serving else status.NOT_SERVING)

    def close(self) -> None:
        """Nothing is served any more."""
        self._servicer.enter_graceful_shutdown()

    def _checked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def serve(request: Any, context: Any) -> Any:
            who = visitor(context)
            if not self._asked.take(who.names[0] if who.names else who.host)[1]:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the health was asked for too often")
            try:
                self._admit(who)
            except NebulaError as error:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, error.what)
            return method(request, context)

        return serve
