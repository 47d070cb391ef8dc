"""`nb.data`: a published dataset of an owner, as a `tf.data.Dataset`."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from whale_nebula.accounts.registry import Registry
from whale_nebula.datasets.grants import Grants
from whale_nebula.datasets.guard import MOST_ROWS, Guard, Reader, Usage
from whale_nebula.datasets.reading import DatasetClient, DatasetInfo, LocalClient, RowSelection, open_remote
from whale_nebula.datasets.report import AUDIT
from whale_nebula.datasets.schema import STRING, Column
from whale_nebula.errors import AuditError, ConfigError, IdentityError, OptionError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.runtime.run import Run, current_run
from whale_nebula.scopes.options import check_integer, check_signature
from whale_nebula.security import Credentials, Identity, authority, code, files
from whale_nebula.security.audit import LOG_IN_USE, AuditLog
from whale_nebula.site import calling_site, short_traceback
from whale_nebula.tf import datasets as tf_datasets
from whale_nebula.tf.failures import carry_errors

_URL = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)://([a-z0-9_-]+)")
_PREFETCHED_BATCHES = 4
_MAX_LOGS = 64
_POLL_SECONDS = 0.2
T = TypeVar("T")


@check_signature
@short_traceback
def data(
    source: str,
    *,
    batch: int,
    seed: int | None = None,
    purpose: str | None = None,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """A published dataset of a cluster's owner: "gpu://corpus". The config has its location (`data:`).

    An element is a batch, a dict with a tensor for each column of the published schema. Each iteration is a pass over
    all rows. With a `seed` their order follows from the seed and the number of the pass, the same on every machine;
    without one, it is the stored order. `skip(n)` starts at a later batch without reading the skipped ones.

    Each batch is authorised, counted and recorded where the data is. `purpose` is the purpose of the grant; it is
    optional if there is only one grant.
    """
    where, match = str(calling_site()), _URL.fullmatch(source) if isinstance(source, str) else None
    if match is None:
        raise OptionError(
            f"nb.data({source!r}) does not name a dataset", where=where, mend='nb.data("gpu://corpus", batch=32)'
        )
    size, order_seed = check_integer("batch", batch), None if seed is None else check_integer("seed", seed)
    if not 0 < size <= MOST_ROWS:
        raise OptionError(
            f"batch={size} is out of range", where=where, why=f"it must be from 1 to {MOST_ROWS}", mend="batch=256"
        )
    if order_seed is not None and not 0 <= order_seed < 1 << 63:
        raise OptionError(f"seed={order_seed} is too large or negative", where=where, mend="seed=1")
    if purpose is not None and not isinstance(purpose, str):
        raise OptionError(f"purpose={purpose!r} is not a string", where=where, mend='purpose="my study"')
    if not isinstance(drop_remainder, bool):
        raise OptionError(
            f"drop_remainder={drop_remainder!r} is neither True nor False", where=where, mend="drop_remainder=True"
        )
    client = _open_client(current_run(), match[1], purpose, where)
    return Batches(ReadingPlan(client, client.describe(match[2]), match[2], size, order_seed, drop_remainder), 0)


class ReadingPlan:
    """What is read of a dataset, and how: its client and description, the seed of the order, and the number of
    `batches` of a pass, each of `batch` rows.
    """

    def __init__(
        self, client: DatasetClient, info: DatasetInfo, name: str, batch: int, seed: int | None, drop_remainder: bool
    ) -> None:
        self.client, self.info, self.name, self.batch, self.seed = client, info, name, batch, seed
        self.drops_remainder = drop_remainder
        full, rest = divmod(info.count, batch)
        self.batches = full + (rest > 0 and not drop_remainder)

    def read_pass(self, number: int, first: int) -> Iterator[dict[str, Any]]:
        """The batches of a pass, from a given one on."""
        last = min(self.info.count, self.batches * self.batch)
        return self.client.read(
            RowSelection(self.name, self.seed, number, first * self.batch, last, self.batch), self.info
        )

    def find_spec(self, column: Column) -> tf.TensorSpec:
        """The shape and dtype of a column in a batch."""
        rows = self.batch if self.drops_remainder else None
        return tf.TensorSpec((rows, *column.shape), tf.dtypes.as_dtype(column.dtype), column.name)


class Batches(tf_datasets.IdentityDataset):
    """The result of `nb.data`: a dataset that yields a pass in every iteration, from its batch `first` on."""

    def __init__(self, plan: ReadingPlan, first: int) -> None:
        self._plan, self._first = plan, min(first, plan.batches)
        passes = itertools.count()
        schema = plan.info.schema

        def iterate_pass() -> Iterator[dict[str, Any]]:
            number = next(passes)
            if self._first < plan.batches:
                found = _read_ahead(lambda: plan.read_pass(number, self._first), _PREFETCHED_BATCHES)
                with contextlib.closing(found), carry_errors():  # type: ignore[type-var]
                    for columns in found:
                        yield {each.name: _to_value(each, columns[each.name]) for each in schema}

        spec = {each.name: plan.find_spec(each) for each in schema}
        made = tf.data.Dataset.from_generator(iterate_pass, output_signature=spec)
        count = tf.data.experimental.assert_cardinality(plan.batches - self._first)
        super().__init__(made.apply(count).prefetch(1))

    def skip(self, count: Any, name: str | None = None) -> tf.data.Dataset:
        """The dataset from a later batch on; skipped rows are not read."""
        return Batches(self._plan, self._first + max(0, int(count)))


def _to_value(column: Column, array: Any) -> Any:
    """A column as a value for TensorFlow: strings become an array of bytes."""
    return array if column.dtype != STRING or array.size else np.empty(array.shape, "S1")


# ---------------------------------------------------------------------- the reader
def _open_client(run: Run, cluster: str, purpose: str | None, where: str) -> DatasetClient:
    """The client for a cluster's data: of its owner's registry if that is configured and this process is in that
    cluster or alone, otherwise of the owner's service.
    """
    home = run.config.data.get(cluster)
    if home is None:
        known = list(run.config.data)
        mend = f'nb.init({{"data": {{"{cluster}": {{"at": "gpu.example.org:7100", "folder": "certs"}}}}}})'
        raise ConfigError(
            f"the config has no 'data' entry for {cluster!r}",
            where=where,
            mend=f"{did_you_mean(cluster, known)}\n{mend}" if known else mend,
        )
    base = Path(run.source).parent
    own = run.alone or run.here().cluster == cluster
    run_id = run.data.setdefault("run", secrets.token_hex(8))
    script = code.find_script()
    program, versions = "" if script is None else code.digest_file(script), code.describe_versions()
    if home.registry is not None and own:
        identity = run_id, program, purpose, versions
        return _open_local_client(run, base / os.path.expanduser(home.registry), cluster, identity)
    if home.at is None:
        mend = f'data: {{{cluster}: {{at: "HOST:PORT", folder: certs}}}}'
        why = f"{home.registry} can be used only on the owner's machines, and this process is in another cluster"
        raise ConfigError(f"data of {cluster!r} cannot be read in this process", where=where, why=why, mend=mend)
    folder = base / os.path.expanduser(home.folder or "certs")
    reader = Reader("", "", run_id, program, purpose, versions)
    return open_remote(home.at, folder, run.config.run, cluster, reader)


def _open_local_client(run: Run, folder: Path, cluster: str, identity: tuple[str, str, str | None, str]) -> LocalClient:
    certificate = authority.load_certificate(folder)
    actor, account, signer = _find_identity(run, cluster, certificate)
    key = str(folder)
    guard: Guard | None = run.data.get(key)
    if guard is None:
        registry, usage = Registry(folder, certificate), Usage(folder)
        log = _open_log(folder / AUDIT, actor, signer)
        guard = run.data[key] = Guard(Grants(registry), usage, log)
        run.close_at_end(registry.close, usage.close, log.close)
    return LocalClient(guard, Reader(account, actor.uri, *identity))


def _find_identity(run: Run, cluster: str, certificate: Any) -> tuple[Identity, str, Credentials | None]:
    """The identity of this process, its account, and its credentials: by its certificate if the owner's authority has
    signed that; otherwise without an account and without credentials.
    """
    attachment = run.attachment
    if attachment is not None and attachment.security is not None:
        with contextlib.suppress(IdentityError):
            found = Credentials.load(attachment.security)
            if files.is_signed_by(found.peer.certificate, certificate):
                return found.identity, found.peer.account, found
    name = files.find_authority_run(certificate) or run.config.run_name
    identity = Identity(name, cluster) if attachment is None else Identity.of_worker(name, attachment.worker)
    return identity, "", None


def _open_log(folder: Path, actor: Identity, signer: Credentials | None) -> AuditLog:
    """Open an access log for this process, with a number if another process on this machine has the same name."""
    for number in range(_MAX_LOGS):
        try:
            return AuditLog(folder / f"data-{actor.stem}{f'-{number}' * (number > 0)}.jsonl", actor, signer)
        except AuditError as error:
            if error.what != LOG_IN_USE:
                raise
    raise AuditError(LOG_IN_USE, where=str(folder))


def _read_ahead(make: Callable[[], Iterator[T]], depth: int) -> Iterator[T]:
    """Prefetch the items of an iterator by a thread, at most `depth` at a time; its exceptions are raised here, after
    the items before them.

    >>> list(_read_ahead(lambda: iter(range(5)), 2))
    [0, 1, 2, 3, 4]
    """
    items: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(depth)
    is_closed = threading.Event()

    def put(is_item: bool, item: T | BaseException | None) -> bool:
        while not is_closed.is_set():
            try:
                items.put((is_item, item), timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def fetch() -> None:
        try:
            found = make()
            try:
                for item in found:
                    if not put(True, item):
                        return
            finally:
                if hasattr(found, "close"):
                    found.close()
            put(False, None)
        except BaseException as error:
            put(False, error)

    threading.Thread(target=fetch, name="nebula-read-ahead", daemon=True).start()
    try:
        while True:
            is_item, item = items.get()
            if isinstance(item, BaseException) and not is_item:
                raise item
            if not is_item:
                return
            yield item  # type: ignore[misc]
    finally:
        is_closed.set()
