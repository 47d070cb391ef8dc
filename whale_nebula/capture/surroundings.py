"""Refuse contexts around a step that change what it computes, such as a distribution strategy."""

from __future__ import annotations

import os
from collections.abc import Callable

import tensorflow as tf

from whale_nebula.errors import StateError, UnsupportedError
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private

_started_before_fork = False


def _note_fork() -> None:
    global _started_before_fork
    _started_before_fork = tf_private.runtime_started()


os.register_at_fork(after_in_child=_note_fork)


def check_surroundings() -> None:
    """Refuse a step in a TensorFlow context that a plan cannot reproduce."""
    if _started_before_fork:
        raise StateError(
            "this process was forked from one where TensorFlow runs already",
            where=_line(),
            why="TensorFlow's threads are not copied with a process, and a step would wait for them forever",
            mend='multiprocessing.get_context("spawn"), or fork before TensorFlow computes anything',
        )
    if tf.config.functions_run_eagerly():
        raise UnsupportedError(
            "tf.config.run_functions_eagerly(True) does not go with scopes",
            where=_line(),
            why="an eager step is never traced, so it cannot be cut",
            mend="tf.config.run_functions_eagerly(False); to debug eagerly, take the scopes out",
        )
    if tf_private.ops_watched():
        raise UnsupportedError(
            "tf.debugging.enable_check_numerics() (or a debugger like it) does not go with scopes",
            where=_line(),
            why="it adds an op to every op that is traced, to those of the plan too",
            mend="tf.debugging.disable_check_numerics(), and tf.debugging.check_numerics(tensor, message) in a layer",
        )
    check_strategy(_line)
    if not tf.executing_eagerly():
        raise UnsupportedError(
            "a step is called inside a tf.function, or in a dataset's map",
            where=_line(),
            why="a plan runs its step piece by piece, which a function of TensorFlow's cannot hold",
            mend="@nb.function on the outer function as well, or instead: what it calls becomes part of its step",
        )


def check_strategy(where: Callable[[], str]) -> None:
    """Refuse a `tf.distribute` strategy around a scope; `where` gives the line of the scope, for the error."""
    if tf.distribute.has_strategy():
        raise foreign_strategy(tf.distribute.get_strategy(), where())


def foreign_strategy(strategy: tf.distribute.Strategy, where: str) -> UnsupportedError:
    """The error for a TensorFlow strategy around scopes of this package."""
    name = type(strategy).__name__
    return UnsupportedError(
        f"tf.distribute.{name} stands around scopes",
        where=where,
        why="both would say where the step runs: the strategy copies it, and a plan cuts it",
        mend=f"leave {name}.scope() and {name}.run out; scopes alone say which cluster runs what",
    )


def _line() -> str:
    """The user's source line, or "" in a thread that a strategy has started."""
    site = script_site()
    return str(site) if site.line else ""
