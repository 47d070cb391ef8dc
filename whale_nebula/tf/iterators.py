"""The ends of iterators over datasets.

A thread of TensorFlow tunes the parallelism of each iterator at intervals that double, up to a minute. The iterator's
destruction waits for this thread, which can miss that it was cancelled (TensorFlow 2.21 notifies it before
`CancellationManager::IsCancelled` is true), and then waits for the end of its interval: in 5 to 35 % of measured cases,
as long again as the iterator has existed. Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import tensorflow as tf

from whale_nebula.tf import require_supported
from whale_nebula.tf.private import TFEpochIterator, iterate_python_frames

require_supported()  # the following imports depend on these versions

from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter  # noqa: E402
from tensorflow.python.data.ops.iterator_ops import OwnedIterator  # noqa: E402

_LOOPS = ("fit", "evaluate", "predict")


def find_epoch_iterator(model: Any, *loops: str) -> Any:
    """The data of this model's innermost running loop of Keras that has one of these names; None if there is none."""
    frames = (frame for frame in iterate_python_frames() if frame.f_code.co_name in loops)
    variables = next((each.f_locals for each in frames if each.f_locals.get("self") is model), {})
    data = variables.get("epoch_iterator")
    return data if isinstance(data, TFEpochIterator) else None


def disable_array_tuning(model: Any) -> None:
    """Switch off tuning of the arrays that this model's running `fit`, `evaluate` or `predict` of Keras reads.

    Keras copies their rows in a parallel map, whose default parallelism is the number of cores. Other datasets are the
    user's, and keep their options.
    """
    data = find_epoch_iterator(model, *_LOOPS)
    dataset = data._distributed_dataset if data and isinstance(data.data_adapter, ArrayDataAdapter) else None
    # another kind under a tf.distribute strategy; validation in `fit` reads the same one after each epoch
    if isinstance(dataset, tf.data.Dataset) and dataset.options().autotune.enabled is not False:
        options = tf.data.Options()
        options.autotune.enabled = False
        data._distributed_dataset = dataset.with_options(options)


def release_iterators(seconds: float) -> None:
    """Destroy all iterators of this process, which is about to exit, and wait for that at most so many seconds."""
    until = time.monotonic() + seconds
    threads = []
    for each in gc.get_objects():
        if type(each) is OwnedIterator:
            references = [vars(each).pop("_iterator_resource", None)]
            threads.append(threading.Thread(target=references.clear, daemon=True))
            threads[-1].start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
