"""Worker: a save in a run whose other cluster may claim to share this one's host and folder.

`claiming_worker` sends the digest of host and folder that it has received from the other one, instead of its own; the
folders of both workers follow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import keras

import whale_nebula as nb
from tests.parity_harness import data
from tests.processes.worker_reports import report_value
from whale_nebula.launch import attach
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.session.session import Session
from whale_nebula.wire.message import SESSION, build_message


def repeat_digest(self: Session, sheet: Mapping[str, Any]) -> Mapping[str, Any]:
    """Receive first, and repeat the other worker's digest."""
    hellos = {peer: link.take(SESSION, 60.0) for peer, link in self.links.items()}
    for peer, link in self.links.items():
        hello = {**sheet, "host": hellos[peer]["host"]}
        link.post(build_message(SESSION, "HELLO", **hello, doing="nb.init", line="save_weights.py:1"))
    return hellos


def main(claiming_worker: str, *folders: str) -> None:
    launched = attach()
    assert launched is not None
    os.chdir(folders[launched.cluster == "npu"])
    if launched.worker == claiming_worker:
        Session.hello = repeat_digest  # type: ignore[method-assign]
    nb.init()
    inputs = keras.Input((8,))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(4)(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    model.fit(data(8, 8), data(8, 1), batch_size=4, verbose=0)
    model.save_weights("kept.weights.h5")
    report_value("writes", current_run().writes_files)
    report_value("there", os.path.exists("kept.weights.h5"))


if __name__ == "__main__":
    main(*sys.argv[1:])
