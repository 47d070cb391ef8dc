"""The side that is dialled: it takes what comes in at the listener, and looks after it."""

from __future__ import annotations

from whale_nebula.errors import TransportError
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc.carrier import GrpcCarrier
from whale_nebula.transport.grpc.connection import Connection
from whale_nebula.transport.grpc.knock import Knock
from whale_nebula.transport.grpc.lane import Lane
from whale_nebula.transport.grpc.listener import Hear
from whale_nebula.transport.grpc.probing import probe

_PROMPT_SECONDS = 0.3  # within which a worker that lives has dialled again, as a rule


class AwaitingCarrier(GrpcCarrier):
    """Waits to be dialled. `where` is the other worker's own address, if any: there it is looked for once it went.

    What is found there counts only if it was ever open to this side: an address behind a wall refuses everybody.
    """

    def __init__(self, here: str, there: str, where: str, *, deadlines: Deadlines) -> None:
        super().__init__(here, there, where, deadlines)
        self._was_open = False
        self._trouble = "it has not dialled yet"

    def take(self, knock: Knock, lane: Lane) -> Hear:
        """A stream has come in, and whoever dialled it has been found to be the other worker."""
        if self._closed or self._receiver is None:
            raise TransportError(f"worker '{self.here}' is {'closing' if self._closed else 'not ready yet'}")
        if knock.lane == 0:
            connection = Connection(knock.connection)
            connection.add(0, lane)
            # The link greets at once: what it says waits in the lane until gRPC asks for it.
            self._adopt(connection)
        else:
            connection = self._present(knock)
            connection.add(knock.lane, lane)
        return connection.hearer(knock.lane, lambda frame: self._hear(connection, frame))

    def _present(self, knock: Knock) -> Connection:
        connection = self._connection
        if connection is None or connection.name != knock.connection:
            raise TransportError("a further lane of a connection that is no more")
        return connection

    def _keep(self) -> None:
        attempt = 0
        while not self._closed:
            if self._connection is not None:
                attempt = 0
                self._was_open = self._was_open or (self.where != "" and self._found())
                self._rest(self._deadlines.look, unless_connected=False)
            else:
                self._rest(_PROMPT_SECONDS + self._back_off(attempt), unless_connected=True)
                attempt += 1
                if self._was_open and self._connection is None:
                    self._found()

    def _found(self) -> bool:
        """Whether the other worker's own port is still there; raises once it has refused twice."""
        found = probe(self.where, self._deadlines.connect)
        if found.found != "refused":
            self._refusals = 0
            return True
        if self._refused() and self._connection is None:
            raise self._dead()
        return False
