"""A curriculum by length: training begins with short sequences, which grow to full length."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.capture.step import Signature, signature
from whale_nebula.errors import DataError, OptionError
from whale_nebula.runtime.keras import set_step_options
from whale_nebula.runtime.run import current_run, wait_for_traces
from whale_nebula.runtime.step.step import Arguments, Step, Unpack, find_declared_inputs, replace_sizes
from whale_nebula.scopes.step_options import StepOptions, current_step_options, replace_options
from whale_nebula.site import script_site
from whale_nebula.tf.keras_training import change_fit_data, list_loop_callbacks

from .length_options import ByLength, LengthOptions, ShapesByLength

Pace = str | Mapping[int, int]
ROOTS = {"linear": 1, "root": 2}
MODES = ("truncate", "pack")


class Position(NamedTuple):
    """The step at which a pass over a dataset begins, and the next step of the pass."""

    begin: tf.Variable
    reached: tf.Variable

    @classmethod
    def at(cls, step: int) -> Position:
        """The position of a dataset that begins with this step."""
        return cls(*(tf.Variable(step, dtype=tf.int64, trainable=False) for _ in range(2)))


class Curriculum(keras.callbacks.Callback):
    """Sequences of `start` tokens at first and of `end` from step `steps` on, in multiples of `step`.

    At step t of T the length is start + (end - start) (t / T)^(1 / r), rounded down: r is 1 (`pace="linear"`) or 2
    (`"root"`, which grows faster at first). A dict gives lengths by their first step directly: `Curriculum(64, 256,
    900, pace={0: 64, 300: 128, 900: 256})`.

    `dataset.apply(curriculum)` truncates the batches of a dataset. `mode="pack"` keeps their tokens: a row of 256
    becomes two of 128, or three of 80, of which the rest is dropped. As a callback of `fit` it does so to the data of
    that `fit`, and the next `fit` continues where it ended.

    `micro_batch` and `compress` are tables by length, or functions of the length: they replace the number of
    micro-batches of `nb.pipeline`, and the codecs of `nb.compress`, in steps of a length, if the curriculum is a
    callback of `fit`, or inside `use_options` in other loops. An entry holds from its length on, and lengths before
    the first one keep what scopes say. A codec is "none", what `nb.compress` takes, or an `nb.compress(...)`. With
    "auto" either is chosen for each length before the first step of a `fit`, by predicted seconds; under
    `nb.auto_parallel` each length is planned by itself.

    In a `fit` with scopes, the step of the next length is traced in the background while steps of the present one run,
    unless `ahead` is False.

    >>> [Curriculum(8, 64, 100).length(step) for step in (0, 30, 99, 100, 1000)]
    [8, 24, 56, 64, 64]
    >>> [Curriculum(8, 64, 100, pace="root").length(step) for step in (0, 30, 99, 100)]
    [8, 32, 56, 64]
    """

    def __init__(
        self,
        start: int,
        end: int,
        steps: int,
        *,
        step: int = 8,
        pace: Pace = "linear",
        mode: str = "truncate",
        micro_batch: ByLength | str | None = None,
        compress: ByLength | str | None = None,
        ahead: bool = True,
    ) -> None:
        super().__init__()
        for name, value in {"start": start, "end": end, "steps": steps, "step": step}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(
                    f"{name}={value!r} of a curriculum is not a positive integer",
                    mend=f"{name}=64, or another positive integer",
                )
        if start > end:
            raise OptionError(
                f"a curriculum from length {start} to {end}",
                why="sequence lengths must increase",
                mend=f"Curriculum({end}, {start}, ...)",
            )
        if mode not in MODES:
            raise OptionError(
                f"mode={mode!r} of a curriculum is not a valid value", mend='mode="truncate", or mode="pack"'
            )
        self.start, self.end, self.steps, self.step, self.pace, self.mode = start, end, steps, step, pace, mode
        if not isinstance(ahead, bool):
            raise OptionError(f"ahead={ahead!r} of a curriculum is not a bool", mend="ahead=True, or ahead=False")
        self._ahead = ahead
        self._end: int | None = None
        self._full_shapes: list[tuple[int | None, ...]] = []
        self._full_rows = 1
        self._lengths_by_step: dict[int, int] = {}
        self._step: Step | None = None
        self._position: Position | None = None
        self._cuts = False
        self.changes: Mapping[int, int] = (
            self._read_table(pace) if isinstance(pace, Mapping) else self._list_changes(pace)
        )
        site = script_site(sys._getframe(1))
        self._requested_options = self._options = LengthOptions.parse(self.lengths, micro_batch, compress, site)
        self._checked = False

    def _list_changes(self, pace: Any) -> dict[int, int]:
        """The lengths by their first step: each begins where the pace first reaches it."""
        if not isinstance(pace, str) or pace not in ROOTS:
            raise OptionError(
                f"pace={pace!r} of a curriculum is not a valid value",
                mend='pace="linear", pace="root", or a table {0: 64, 300: 128}',
            )
        changes = {0: self.start}
        first = self.start - self.start % self.step + self.step
        for length in (*range(first, self.end, self.step), self.end):
            if length <= self.start:
                continue
            above, power = -self.steps * (length - self.start) ** ROOTS[pace], ROOTS[pace]
            changes[-(above // (self.end - self.start) ** power)] = length
        return dict(sorted(changes.items()))

    def _read_table(self, table: Mapping[int, int]) -> dict[int, int]:
        rows = sorted(table.items()) if all(isinstance(each, int) for row in table.items() for each in row) else []
        lengths = [length for _, length in rows]
        ends = (rows[0], rows[-1]) if rows else None
        if ends != ((0, self.start), (self.steps, self.end)) or lengths != sorted(set(lengths)):
            raise OptionError(
                f"pace={dict(table)!r} is not a table from {self.start} to {self.end} in {self.steps} steps",
                why="it maps steps to the lengths that start there: step 0 to the start, the last step to the end, "
                "and lengths must increase",
                mend=f"pace={{0: {self.start}, {self.steps}: {self.end}}}",
            )
        return dict(rows)

    @property
    def lengths(self) -> list[int]:
        """All lengths, the shortest first."""
        return list(self.changes.values())

    def length(self, step: int) -> int:
        """The length of sequences in a step, counted from 0."""
        return next(length for begin, length in reversed(list(self.changes.items())) if begin <= max(step, 0))

    def cut(self, batch: Any, step: int) -> Any:
        """A batch with the length of a step, for loops that draw their own batches."""
        self._check(batch)
        self._full_shapes = [tuple(each.shape) for each in _list_tensors(batch)]
        self._full_rows = next((int(shape[0]) for shape in self._full_shapes if self.end in shape[1:] and shape[0]), 1)
        return self._cut(batch, self.length(step))

    def __call__(self, dataset: tf.data.Dataset, first: int = 0) -> tf.data.Dataset:
        """A dataset of batches with the lengths of steps, beginning with step `first`. Each iteration continues where
        the previous one has ended.
        """
        if not isinstance(first, int) or first < 0:
            raise OptionError(
                f"first={first!r} of a curriculum is not a step", mend="first=0, the step of the first batch"
            )
        if not isinstance(dataset, tf.data.Dataset):
            raise self._not_a_dataset_error(dataset)
        self._check(dataset.element_spec)
        return self._cut_dataset(dataset, Position.at(first))

    def set_model(self, model: Any) -> None:
        """As a callback: cut the training data of the `fit` that begins."""
        super().set_model(model)
        self._cuts, self._checked = change_fit_data(model, self._cut_fit), False
        self._options = self._requested_options
        self._lengths_by_step, self._step = {}, None
        set_step_options(model, self._find_options if self._options or self._ahead else None)

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a `fit` whose data it could not cut."""
        if not self._cuts:
            raise OptionError(
                "a curriculum among the callbacks found no data of model.fit",
                why="it cuts the data when fit sets the callback's model, but your own CallbackList has set it before",
                mend="model.fit(dataset, callbacks=[curriculum]), or model.fit(dataset.apply(curriculum))",
            )
        steps, epochs = (self.params.get(name) for name in ("steps", "epochs"))
        self._end = None if not steps or self._position is None else int(self._position.begin) + epochs * steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Refuse options by length without effect: for a model without scopes, or without boundaries."""
        if self._options and not self._checked:
            raise OptionError(
                f"micro_batch= and compress= of a curriculum have no effect on model {self.model.name!r}",
                where=str(self._options.site),
                why="the model has no scopes, so Keras runs its steps",
                mend='put layers in stages (with nb.stage(cluster="gpu"): ...), or remove both options',
            )
        self._options.check_program(self._step)

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the options by length, as the next `fit` may have another curriculum; wait for background traces."""
        set_step_options(self.model, None)
        wait_for_traces(current_run())

    def use_options(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Context with `micro_batch` and `compress` of a step, for loops that draw their own batches, and for `nb.plan`
        and `nb.verify`.
        """
        if self._options.open:
            choose = functools.partial(self._choose_in_loop, step)
            return replace_options(StepOptions(description=str(self._options.site), choose=choose))
        length = self.length(step)
        return replace_options(self._add_trace(self._options.find(length), length))

    def _choose_in_loop(self, number: int, step: Step, arguments: Arguments, unpack: Unpack) -> StepOptions | None:
        """The options of a step of a loop; the first one decides those that are "auto"."""
        length = self.length(number)
        self._choose_open(length, step, arguments, unpack)
        return self._add_trace(self._options.find(length), length)

    def _find_options(self, batch: Any, step: Step, arguments: Arguments, unpack: Unpack) -> StepOptions | None:
        """The options for a batch that was cut; none after a `fit` with this curriculum has failed."""
        if all(each is not self for each in list_loop_callbacks("fit")):
            set_step_options(self.model, None)
            return None
        pairs = zip(_list_tensors(batch), self._full_shapes, strict=True)
        tensor, full = next((each, full) for each, full in pairs if self.end in full[1:])
        rows, length = int(tensor.shape[0]), int(tensor.shape[full.index(self.end, 1)])
        if not self._checked:
            self._full_rows = rows // self._packs[length]
            self._options.check_rows(rows, length, self._packs)
            self._choose_open(length, step, arguments, unpack)
        self._checked, self._step = True, step
        return self._add_trace(self._options.find(length), length)

    def _choose_open(self, length: int, step: Step, arguments: Arguments, unpack: Unpack) -> None:
        """Choose the options that are "auto", before the first step, which has this length."""
        if self._options.open:
            layout, tensors = signature(arguments, step.whole, find_declared_inputs())
            shapes = [tuple(each.shape) for each in tensors]
            by_length = {each: self._resize(shapes, layout.batched, length, each) for each in self.lengths}
            all_shapes = ShapesByLength(by_length, self._resize(shapes, layout.batched, length, None))
            self._options = self._options.choose(step, arguments, unpack, all_shapes)

    @property
    def _packs(self) -> dict[int, int]:
        """The number of sequences that a full one becomes, by length."""
        return {each: self.end // each if self.mode == "pack" else 1 for each in self.lengths}

    def _add_trace(self, options: StepOptions | None, length: int) -> StepOptions | None:
        """The options of a step with a trace of the next length after it, unless there is none in this `fit`."""
        later = next(((begin, each) for begin, each in self.changes.items() if each > length), None)
        if not self._ahead or later is None or (self._end is not None and later[0] >= self._end):
            return options
        follow = functools.partial(self._trace_next, length, later[1])
        return replace(options or current_step_options(), after_step=follow)

    def _trace_next(self, length: int, later: int, step: Step, layout: Signature, unpack: Unpack) -> None:
        """Trace a step for the length `later` in the background, after its first step with another length."""
        if self._lengths_by_step.get(id(step)) == length or not self._full_shapes:
            return
        self._lengths_by_step[id(step)] = length
        shapes = [tuple(spec.shape) for spec in layout.specs]
        resized = replace_sizes(layout, self._resize(shapes, layout.batched, length, later))
        if resized is not None:
            with replace_options(self._options.find(later)):
                step.trace_ahead(resized, unpack, self._full_rows * self._packs[later])

    def _resize(self, shapes: Sequence[Any], batched: Sequence[bool], length: int, later: int | None) -> list[Any]:
        """The shapes of a step's arguments of a length for the length `later`, or with None in cut axes for any length;
        `batched` tells which arguments have the rows of the batch.
        """
        now, then = ([self._resize_row(full, each) for full in self._full_shapes] for each in (length, later))
        rows_of_arguments, packs = [shape[1:] for shape in shapes], self._packs
        if rows_of_arguments != now:  # of a loop's function, whose arguments need not be the tensors of its batch
            resized = dict(zip(now, then, strict=True))
            then = [resized.get(row, row) for row in rows_of_arguments]
        new_shapes: list[Any] = []
        for shape, row, is_batched in zip(shapes, then, batched, strict=True):
            count = shape[0] if shape else None
            if count is not None and is_batched:
                count = None if later is None else count // packs[length] * packs[later]
            new_shapes.append((count, *row) if shape else ())
        return new_shapes

    def _resize_row(self, full: Sequence[int | None], length: int | None) -> tuple[int | None, ...]:
        """The shape of a tensor's row for a length, from the tensor's full shape."""
        return tuple(length if size == self.end else size for size in full[1:])

    def _cut_fit(self, dataset: Any, batches: int | None) -> tf.data.Dataset:
        if not isinstance(dataset, tf.data.Dataset):
            raise self._not_a_dataset_error(dataset)
        self._check(dataset.element_spec)
        self._full_shapes = [tuple(each.shape) for each in _list_tensors(dataset.element_spec)]
        if self._position is None:
            self._position = Position.at(0)
        self._position.begin.assign(self._position.reached)
        return self._cut_dataset(dataset, self._position, batches)

    def _cut_dataset(self, dataset: tf.data.Dataset, position: Position, batches: int | None = None) -> tf.data.Dataset:
        """A dataset cut from a position on. A reader may stop after `batches`, without reading the end of a pass."""
        begins, lengths = tf.constant(list(self.changes), tf.int64), tf.constant(self.lengths, tf.int32)
        begin, reached = position
        count = dataset.cardinality()
        last = count if batches is None else tf.constant(batches, tf.int64)

        def start_pass(_: Any) -> tf.data.Dataset:
            before = begin.read_value()

            def cut(number: Any, batch: Any) -> Any:
                step = before + number
                reached.assign(step + 1)
                begin.assign(tf.where(number + 1 == last, step + 1, begin))
                return self._cut(batch, lengths[tf.searchsorted(begins, step[None], side="right")[0] - 1])

            return dataset.enumerate().map(cut)

        def end_pass(_: Any) -> Any:
            begin.assign(reached)
            return False

        one_pass = tf.data.Dataset.range(1).flat_map(start_pass)
        if count != tf.data.UNKNOWN_CARDINALITY:
            return one_pass.apply(tf.data.experimental.assert_cardinality(count))
        nothing = tf.data.Dataset.range(1).filter(end_pass).flat_map(start_pass)
        return one_pass.concatenate(nothing)

    @staticmethod
    def _not_a_dataset_error(value: Any) -> DataError:
        return DataError(
            f"a curriculum requires a dataset, not {type(value).__name__}",
            why="it cuts the batches of a dataset at each step",
            mend="tf.data.Dataset.from_tensor_slices((x, y)).batch(32).apply(curriculum)",
        )

    def _cut(self, batch: Any, length: Any) -> Any:
        return tf.nest.map_structure(
            lambda each: self._pack(each, length) if self.mode == "pack" else self._truncate(each, length), batch
        )

    def _truncate(self, tensor: Any, length: Any) -> Any:
        """Truncate each axis of full length, except the first."""
        parts = [slice(None)] + [slice(length) if size == self.end else slice(None) for size in tensor.shape[1:]]
        return tensor[tuple(parts)]

    def _pack(self, tensor: Any, length: Any) -> Any:
        """Divide each row into several rows of this length, one below the other."""
        if self.end not in tuple(tensor.shape[1:2]):
            return tensor
        ops = np if isinstance(tensor, np.ndarray) else tf
        count = self.end // length
        return ops.reshape(tensor[:, : count * length], [-1, length, *tensor.shape[2:]])

    def _check(self, batch: Any) -> None:
        """Refuse a batch, or its spec, without an axis of full length; for packing also one that has it anywhere but in
        the second axis of each tensor.
        """
        known = [tf.TensorShape(each.shape) for each in tf.nest.flatten(batch)]
        shapes = [() if each.rank is None else tuple(each) for each in known]
        cut = [shape for shape in shapes if self.end in shape[1:]]
        if not cut:
            raise DataError(
                f"no tensor of a batch has an axis of {self.end}: {', '.join(map(str, shapes))}",
                why="a curriculum cuts batches of full-length sequences",
                mend=f"dataset.padded_batch(32, padded_shapes=([{self.end}], [{self.end}]))\n"
                "if the data was already cut: use either dataset.apply(curriculum) or callbacks=[curriculum]",
            )
        if self.mode == "pack" and any(shape[1:2] != (self.end,) or self.end in shape[2:] for shape in shapes):
            raise DataError(
                f"a batch of {', '.join(map(str, shapes))} cannot be packed",
                why=f"in each tensor, only the second axis may have the size {self.end}",
                mend='mode="truncate"',
            )

    def get_config(self) -> dict[str, Any]:
        """The options to create one with equal lengths, as `ByTokens` keeps them."""
        pace = self.pace if isinstance(self.pace, str) else [[begin, length] for begin, length in self.changes.items()]
        return {
            "start": self.start,
            "end": self.end,
            "steps": self.steps,
            "step": self.step,
            "pace": pace,
            "mode": self.mode,
        }


def _list_tensors(batch: Any) -> list[Any]:
    """The tensors of a batch, or their specs."""
    return [each for each in tf.nest.flatten(batch) if hasattr(each, "shape")]


class ByTokens(keras.optimizers.schedules.LearningRateSchedule):
    """A learning-rate schedule by tokens: its step n is reached after as many tokens as n steps of full length have.

    >>> schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 100, 0.0)
    >>> counted = ByTokens(schedule, Curriculum(8, 64, 100, step=64))
    >>> [round(float(counted(step)), 4) for step in (0, 100, 187)]
    [1.0, 0.875, 0.005]
    """

    def __init__(self, schedule: Any, curriculum: Curriculum | Mapping[str, Any]) -> None:
        super().__init__()
        if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule | Mapping):
            raise OptionError(
                f"ByTokens requires a learning-rate schedule, not {schedule!r}",
                why="it calls the schedule with the equivalent number of full-length steps",
                mend="ByTokens(keras.optimizers.schedules.CosineDecay(1e-3, 900), curriculum)",
            )
        if not isinstance(curriculum, Curriculum | Mapping):
            raise OptionError(
                f"ByTokens requires a Curriculum, not {curriculum!r}",
                mend="ByTokens(schedule, Curriculum(64, 256, 900))",
            )
        if isinstance(curriculum, Mapping):  # from the config of a loaded model
            options = dict(curriculum)
            pace = options.pop("pace")
            curriculum = Curriculum(**options, pace=pace if isinstance(pace, str) else dict(pace))
        if isinstance(schedule, Mapping):
            schedule = keras.optimizers.schedules.deserialize(schedule)
        self.schedule, self.curriculum = schedule, curriculum

    def __call__(self, step: Any) -> Any:
        """The rate at a step of the optimizer."""
        if self.curriculum.mode == "pack":  # every step has the tokens of one of full length
            return self.schedule(step)
        begins, lengths = np.array(list(self.curriculum.changes)), np.array(self.curriculum.lengths)
        tokens = np.concatenate([[0], np.cumsum(lengths[:-1] * np.diff(begins))])
        at = tf.cast(step, tf.int64)
        row = tf.searchsorted(tf.constant(begins, tf.int64), at[None], side="right")[0] - 1
        begin, length, before = (tf.gather(tf.constant(each, tf.int64), row) for each in (begins, lengths, tokens))
        return self.schedule(tf.cast(before + (at - begin) * length, tf.float32) / self.curriculum.end)

    def get_config(self) -> dict[str, Any]:
        """The options to create an equal one."""
        return {
            "schedule": keras.optimizers.schedules.serialize(self.schedule),
            "curriculum": self.curriculum.get_config(),
        }
