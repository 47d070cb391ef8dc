"""What a user writes so that a batch stays whole, or so that its parts may be trained as they are."""

from __future__ import annotations

from typing import NamedTuple

from whale_nebula.errors import BatchCoupledError

_ALONE, _, _ALLOW = BatchCoupledError.usual_mends


class Mends(NamedTuple):
    """Lines of a script: one that leaves the batch `alone`, and one that `allow`s rows to depend on each other. Where
    each replica may have one micro-batch, moments can be `shared`.
    """

    alone: str = _ALONE
    allow: str = _ALLOW
    shared: bool = False


def mends(asked: int, *, copied: bool) -> Mends:
    """Those for a batch that `nb.pipeline` asks to be cut into so many parts, and that is cut for replicas too, where
    the step is `copied`.

    >>> mends(4, copied=False).alone, mends(1, copied=True).alone
    ('nb.pipeline(micro_batch=1)', 'nb.replica(1), or leave nb.replica out')
    >>> mends(4, copied=True).alone
    'nb.replica(1) and nb.pipeline(micro_batch=1)'
    """
    if not copied:
        return Mends()
    allow = 'nb.pipeline(coupled="allow") inside nb.replica, which runs it micro-batch by micro-batch'
    if asked > 1:
        return Mends(f"nb.replica(1) and {_ALONE}", allow)
    return Mends("nb.replica(1), or leave nb.replica out", allow, shared=True)
