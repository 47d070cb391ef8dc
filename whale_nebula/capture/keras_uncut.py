"""A functional or Sequential model that was built under scopes, and runs where no step is captured, says so.

Its scopes are entered again only while a step is captured. In a plain tf.function no scope would notice, so the nodes
that bear scopes tell when they run. Calling the model in eager code, without a tape, is only looking: nothing is said,
but where a learned basis is a part of the model, which is not there then.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from whale_nebula import scopes
from whale_nebula.capture.keras_frames import Frames, frames_of
from whale_nebula.capture.projection import learned
from whale_nebula.capture.tracing import current, uncut_on_purpose
from whale_nebula.scopes import Frame
from whale_nebula.scopes.eager import running, tell
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private


def watch_node(node: Any, frames: Frames) -> None:
    """Hear when this node runs: it was made under these scopes, or its layer was, where that is in a Sequential."""
    frames = frames_of(node.operation) or frames
    stage, around = scopes.stage_of(frames), scopes.compress_of(frames)
    if stage is not None:
        projects = around is not None and learned(around) is not None
        tf_private.on_run(node, functools.partial(_ran, stage, projects))


def watch_sequential(model: Any) -> None:
    """Hear when the layers of a Sequential run; it makes their nodes later, and anew with each layer."""
    if not hasattr(model.build, "nebula_heard"):
        tf_private.on_build(model, functools.partial(_built, model))
        model.build.nebula_heard = True


def _built(model: Any) -> None:
    for level in tf_private.nodes_by_depth(model).values():
        for node in level:
            if not frames_of(node):
                watch_node(node, frames_of(node.operation))


def _ran(stage: Frame, projects: bool, arguments: Any) -> None:
    if current() is not None or uncut_on_purpose():
        return
    code = running()
    if code is None or (tf.executing_eagerly() and not tf_private.tape_records() and not projects):
        return
    if any(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(arguments)):
        place = script_site()
        then = f"so the scopes that the model was built in, at {stage.site}, catch nothing"
        then += ", and nothing is projected on its learned basis" * projects
        tell(stage, code, then, where=place, program=place)
