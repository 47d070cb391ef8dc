"""Manual checkpoints: `nb.save`, `nb.restore`, `nb.resumed` and `nb.state`."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.checkpoint.folder import Folder, FoundCheckpoint
from whale_nebula.checkpoint.manifest import Position
from whale_nebula.errors import AccountError, CheckpointError, OptionError, StateError
from whale_nebula.runtime.checkpoint.fit_position import program_of, variables_of
from whale_nebula.runtime.checkpoint.group import Group, begin_manifest, choose_source
from whale_nebula.runtime.checkpoint.open_checkpoints import check_account_room, resolve_folder
from whale_nebula.runtime.checkpoint.slices import Source
from whale_nebula.runtime.checkpoint.writer import Snapshot, commit_parts, count_bytes, write_part
from whale_nebula.runtime.run import current_run
from whale_nebula.scopes.options import check_signature
from whale_nebula.site import calling_site, script_site, short_traceback, warn_at
from whale_nebula.tf.keras_training import build_optimizer


class Resumed(NamedTuple):
    """The position at which a run resumes: `step` steps of training are done; in a `fit` also its epoch, and the
    batches of that epoch.
    """

    step: int
    epoch: int
    batch: int


@check_signature
def resumed() -> Resumed | None:
    """The position at which this run resumes from a checkpoint; None for a new run.

    A custom loop starts there: `for batch in dataset.skip(nb.resumed().step if nb.resumed() else 0)`. `fit` does so
    automatically.

    >>> import whale_nebula as nb
    >>> nb.resumed() is None
    True
    """
    checkpoints = current_run().checkpoints
    found = None if checkpoints is None else checkpoints.resumed
    return None if found is None else Resumed(found.step, found.epoch, found.batch)


@check_signature
@short_traceback
def state(**objects: Any) -> None:
    """Save these objects with the run, each by its name; if the run resumes from a checkpoint, restore them.

    They are saved as they were when the last step returned. A loop that draws its batch and then calls the step
    therefore draws the next batch when it resumes; it must update counters before it calls the step.

    >>> import numpy as np, whale_nebula as nb
    >>> nb.state(generator=np.random.default_rng(1))
    """
    checkpoints = current_run().checkpoints
    for name, value in objects.items():
        if checkpoints is not None:
            checkpoints.extra_state.add_object(name, value)


@check_signature
@short_traceback
def save(path: str | os.PathLike[str], model: Any) -> None:
    """Save a model with its optimizer in a folder. Every process calls it at the same point; the model is written when
    it returns.

    >>> import tempfile, keras, whale_nebula as nb
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nb.save(folder + "/model", model)
    ...     nb.restore(folder + "/model", model)
    """
    run = current_run()
    _build_optimizer(_check_model("save", model))
    variables = variables_of(model)
    run.settle()
    group = Group(run)
    folder = Folder(resolve_folder(os.fspath(path), run.attachment), group.label, single=True)
    with run.share_failures():
        _check_no_run(folder)
    entries = list(group.list_entries(variables))
    snapshot = Snapshot(begin_manifest(run, Position(), {}), group.worker, entries, {})
    with run.share_failures():
        try:
            check_account_room(run.attachment, folder.path, count_bytes(entries) * len(group.members))
            report = write_part(folder, snapshot).digest
        except AccountError as error:
            report = f"!{error.what}"
        except (OSError, tf.errors.OpError) as error:
            report = f"!{error}"
    reports = group.exchange("the parts of a checkpoint", report)
    failed = {worker: each[1:] for worker, each in reports.items() if each.startswith("!")}
    if failed:
        why = "; ".join(f"{worker}: {each}" for worker, each in failed.items())
        raise CheckpointError(
            "the model could not be saved", where=folder.path, why=why, mend="free space on that disk"
        )
    with run.share_failures():
        if group.commits:
            commit_parts(folder, snapshot.manifest, reports, group.members, 0)
    group.exchange("the end of nb.save", None)


def _build_optimizer(model: Any) -> None:
    """Create the slots of a model's optimizer, which Keras creates with the first step."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        build_optimizer(optimizer, model.trainable_variables)


def _check_no_run(folder: Folder) -> None:
    """Refuse to save a model to a folder with checkpoints of a run: `nb.restore` could read only the model or these."""
    here = folder.read_single()
    found = next((each for each in [here, *Folder(folder.path).scan()] if each.manifests and not each.is_manual), None)
    if found is not None:
        raise CheckpointError(
            "a model cannot be saved to the checkpoint folder of a run",
            where=folder.path,
            why=f"{found.path} is a checkpoint of a run",
            mend='nb.save("another/folder", model)',
        )


@check_signature
@short_traceback
def restore(path: str | os.PathLike[str], model: Any) -> None:
    """Restore a model and its optimizer from a checkpoint of `nb.save`, or of a run (the newest one, or the one whose
    folder `path` is). The model may have other scopes than the saved one, or none. In a run of several processes, all
    call it at the same point.
    """
    run = current_run()
    group = Group(run)
    _check_model("restore", model)
    source = _find_source(group, resolve_folder(os.fspath(path).rstrip("/"), run.attachment))
    has_slots = any(name.endswith("/iteration") for name in source.tensors)
    if has_slots:
        _build_optimizer(model)
    if run.checkpoints is not None:
        run.checkpoints.has_read = True
    run.settle()
    variables = _name_as_saved(model, source)
    missing = group.restore(source, variables)
    if run.rounds is not None:
        run.rounds.restart()
    of_model = {id(getattr(variable, "value", variable)) for variable in model.variables}
    lost = [name for name in missing if id(variables[name]) in of_model]
    if lost:
        raise CheckpointError(
            f"variable {lost[0]!r} of {model.name} is not in the checkpoint",
            where=source.path,
            why=f"{len(lost)} of the model's {len(of_model)} variables are not among its {len(source.tensors)} tensors",
            mend=f"whale-nebula checkpoints show {source.path} lists them",
        )
    optimizer = getattr(model, "optimizer", None)
    of_optimizer = {id(getattr(each, "value", each)) for each in getattr(optimizer, "variables", ())}
    unrestored = [name for name in missing if id(variables[name]) in of_optimizer]
    if unrestored and has_slots:
        warn_at(
            script_site(),
            f"{unrestored[0]!r} of {model.name} is not in the checkpoint, and keeps its value"
            + f", like {len(unrestored) - 1} more variables of its optimizer" * (len(unrestored) > 1),
            where=source.path,
            why="it was saved with a different optimizer, or with a different name: Keras numbers unnamed optimizers",
            mend=f'use name="adam" for both optimizers\nlist variables: whale-nebula checkpoints show {source.path}',
        )


def _name_as_saved(model: Any, source: Source) -> dict[str, Any]:
    """The variables of a model by their names in a checkpoint. Warns if several models of the saved run have these
    paths, and none is known to be this one.
    """
    variables, manifest, program = variables_of(model), source.manifest, program_of(model)
    own = manifest.aliases.get(program, {})
    again = any(f"{path}@2" in own for path in variables)
    others = {path for names in manifest.aliases.values() for path in names}
    path = next((each.path for each in model.variables if each.path in others), None)
    if path is not None and (again or program not in manifest.position.programs):
        warn_at(
            script_site(),
            f"several models of that run have a variable {path!r}: {model.name} gets the values of the first",
            where=source.path,
            why=f"{model.name} was built several times"
            if again
            else f"none of them was trained by fit as {model.name}",
            mend="use keras.Model(..., name=...) with a different name for each model, here and where it is trained",
        )
        return variables
    return {own.get(path, path): variable for path, variable in variables.items()}


def _find_source(group: Group, path: str) -> Source:
    """The checkpoint at a path, or the newest one in it."""

    def list_found() -> list[FoundCheckpoint]:
        here = Folder(path, single=True).read_single()
        return [here] if here.manifests or here.problems else Folder(path).scan()

    source = choose_source(group, list_found)
    if source is None:
        raise CheckpointError(
            "there is no complete checkpoint",
            where=path,
            mend=f"check it with whale-nebula checkpoints verify {path}\nor use the folder that was passed to nb.save",
        )
    return source


def _check_model(name: str, model: Any) -> Any:
    """Return the model; refuses other objects, and a model without variables yet. `name` is the calling function."""
    if not hasattr(model, "variables") or not hasattr(model, "metrics"):
        raise OptionError(
            f"nb.{name}(path, {type(model).__name__}): the second argument is not a model",
            where=str(calling_site()),
            why="it must be a Keras model; if it is compiled, its optimizer is included",
            mend=f'nb.{name}("folder", model)',
        )
    if not getattr(model, "built", True):
        raise StateError(
            f"nb.{name} got {model.name}, which has no variables yet",
            where=str(calling_site()),
            why="a model without an input shape creates its variables in its first call",
            mend=f"call model.build(shape), or model(batch), before nb.{name}",
        )
    return model
