"""Pretrain one language model on its own side of the text; run.py starts one for each side."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import experiment
import tensorflow as tf
from one import options


def main() -> int:
    """Pretrain and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=experiment.SIDES)
    parser.add_argument("pretrained", choices=experiment.PRETRAINED)
    asked = options(parser).parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    corpus = experiment.read(asked.text, tuple(asked.languages), asked.test)
    folder = experiment.folder_of(asked.kept, asked.pretrained)
    experiment.prepare(asked.side, corpus.alone[asked.side], folder, experiment.PRETRAINED[asked.pretrained])
    return 0


if __name__ == "__main__":
    sys.exit(main())
