"""Whale's large classification on 64 devices, by its plan: data parallelism compared with a sharded classifier.

    python benchmarks/split/devices.py     # two minutes; prints a table

ResNet-50 and 100,000 classes. FLOPs, gradients and collectives are those of the plan. Assumptions: the speed of a
device (ResNet-50 at 350 images a second, as a V100 does in float32) and the line of a server of eight devices, 35
Gbit/s, for ring collectives; nothing overlaps.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import keras
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.plan.plan import Plan

CLASSES, IMAGE = 100_000, (224, 224, 3)
IMAGES_A_SECOND, LINE = 350, 35e9 / 8


def plan_step(devices: int, *, divided: bool) -> Plan:
    """The plan of a step with one image for each device."""
    nb.init(seed=1)
    body, inputs = keras.applications.ResNet50(include_top=False, weights=None, pooling="avg"), keras.Input(IMAGE)
    for layer in body.layers:  # batch moments would couple rows; they are about a hundredth of the arithmetic
        layer.trainable = not isinstance(layer, keras.layers.BatchNormalization)
    with nb.cluster():
        with nb.replica(devices):
            hidden = body(inputs)
            outputs = None if divided else keras.layers.Dense(CLASSES, use_bias=False)(hidden)
        with nb.split(devices) if divided else contextlib.nullcontext():
            outputs = keras.layers.Dense(CLASSES, use_bias=False)(hidden) if divided else outputs
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = tf.zeros([devices, *IMAGE]), tf.zeros([devices], tf.int32)
    plan: Any = nb.plan(model, *rows)
    nb.shutdown()
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=64)
    asked = parser.parse_args()
    count = asked.devices
    ring = 2 * (count - 1) / count / LINE
    whole, divided = plan_step(count, divided=False), plan_step(count, divided=True)
    everything = sum(stage.gradient_bytes for stage in whole.stages.values())
    body, head = divided.stages["replica"], divided.stages["split"]
    speed = IMAGES_A_SECOND * body.flops / count
    crossing = sum(each.bytes * each.times for each in divided.collectives)
    print(f"weights: {everything / 1e6:.0f} MB, of the body {body.gradient_bytes / 1e6:.0f} MB")
    print("images a device | copies, s | divided, s | times as fast")
    for rows in (8, 32, 128):
        computed = rows * (body.flops + head.flops) / count / speed
        copies = computed + everything * ring
        parts = computed + body.gradient_bytes * ring + rows * crossing / LINE
        print(f"{rows} | {copies:.3f} | {parts:.3f} | {copies / parts:.1f}")


if __name__ == "__main__":
    main()
