"""The failpoints: places in the library at which a test can make something happen, by name.

Each is one line, `failpoint("update.begun")`, at the place that its text here describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Point(NamedTuple):
    """What a failpoint stands at, and whether there is a connection there that can be dropped."""

    what: str
    connection: bool = False


POINTS: Mapping[str, Point] = MappingProxyType(
    {
        "hello.before": Point("nb.init is about to tell the others who this process is"),
        "hello.after": Point("all have said who they are"),
        "agree.before": Point("a program is traced, its digest is about to be told"),
        "agree.after": Point("all have traced the same program"),
        "step.before": Point("a step's sheet (rows, fingerprints) is about to be told"),
        "step.announced": Point("the sheet is on its way, the stages are about to compute"),
        "step.checked": Point("all others have announced the same step"),
        "forward.before": Point("a stage is about to take and compute a micro-batch"),
        "backward.before": Point("a stage is about to run a micro-batch backwards"),
        "update.before": Point("the micro-batches of a phase are done, all have agreed to the update"),
        "update.begun": Point("from here on a failure leaves a torn model"),
        "update.after": Point("the update is applied, its scalars have crossed"),
        "step.after": Point("the step is counted as applied"),
        "meet.before": Point("a read of the whole model is about to begin"),
        "meet.after": Point("all have come to it"),
        "chunk.first.before": Point("the first chunk of a tensor is about to be sent", connection=True),
        "chunk.first.after": Point("the first chunk of a tensor was handed to the connection", connection=True),
        "chunk.middle.before": Point("a chunk that is neither first nor last is about to be sent", connection=True),
        "chunk.middle.after": Point("a chunk in the middle was handed over", connection=True),
        "chunk.last.before": Point("the last chunk of a tensor is about to be sent", connection=True),
        "chunk.last.after": Point("the last chunk of a tensor was handed over", connection=True),
        "tensor.received": Point("a tensor has come whole, nobody was told yet", connection=True),
        "message.received": Point("a control message has come, nobody was told yet", connection=True),
        "connection.up": Point("there is a fresh connection, the greeting is about to be sent", connection=True),
        "connection.opened": Point("both sides of a connection are known to each other", connection=True),
        "connection.down": Point("a connection is gone, another will be made"),
        "frames.again": Point("what a broken connection has lost is about to be sent again", connection=True),
        "failure.telling": Point("this process has failed and is about to tell another"),
        "link.parting": Point("a link is about to say goodbye"),
        "link.draining": Point("goodbye is said, what was sent is about to be waited for", connection=True),
        "link.closed": Point("a link has ended"),
        "certificate.changed": Point("the files of this process's certificate are other ones than before"),
        "certificate.renewed": Point("a renewed certificate has been read"),
    }
)
