"""One of two sites of local SGD over a line: measures its steps and their waiting time."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import task
import tensorflow as tf

import whale_nebula as nb

BLOCK = 25
"""Steps over the same line; of eight fragments that cross in a hundred steps two fall into it."""


def main() -> None:
    """Train, and print a line of JSON."""
    parser = task.add_options(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("--follow", type=Path, help="the file that wan.py follows")
    parser.add_argument("--lines", nargs=2, default=("", ""), help="what stands in it by turns: '60mbit 20ms' ...")
    parser.add_argument("--loss", action="store_true", help="meet once more, and say what was learned")
    asked = parser.parse_args()
    began = time.process_time()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    nb.init()
    os.sched_setaffinity(0, {("gpu/0", "npu/0").index(nb.here().worker) % (os.cpu_count() or 1)})  # a core per host
    leads = asked.follow is not None and nb.here().worker == "gpu/0"
    model = task.make_model(asked.seed, asked.rate)
    clock = task.Clock(BLOCK, asked.lines, asked.follow.write_text if leads else lambda line: None)
    with nb.cluster(), nb.compress(asked.codec), nb.replica(sync_every=asked.every, outer=asked.outer):
        model.fit(task.make_batches(asked.seed, asked.steps), verbose=0, callbacks=[clock])
        report = nb.last_report()
        loss = (
            model.evaluate(*task.Teacher(7).draw_rows(task.HELD_OUT_ROWS), batch_size=256, verbose=0)
            if asked.loss
            else None
        )
    told = report.meetings
    sent = {name: link.bytes for name, link in report.run.links.items()}
    print(json.dumps({
        "site": nb.here().worker, "blocks": clock.blocks(), "computed": time.process_time() - began,
        "loss": loss, "waited": told.waited_seconds if told else 0.0, "met": told.met if told else 0, "bytes": sent,
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
