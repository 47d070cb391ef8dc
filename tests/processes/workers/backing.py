"""A worker whose training is backed up, broken off and begun again. Argument: a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras

from tests.processes.lesson import fit, taught
from tests.processes.telling import tell

EPOCHS = 3
folder = Path(sys.argv[1])


class BreakOff(keras.callbacks.Callback):
    """Ends a training as a fault does: `on_train_end` does not run."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise KeyboardInterrupt


def trained(*callbacks: Any) -> dict[str, list[str]]:
    keras.utils.set_random_seed(7)
    return fit(taught(), epochs=EPOCHS, callbacks=list(callbacks))


def backup(name: str, **options: Any) -> Any:
    return keras.callbacks.BackupAndRestore(str(folder / name), **options)


def files(name: str) -> list[str]:
    return sorted(path.name for path in (folder / name).iterdir())


tell("unbroken", trained())
try:
    trained(backup("backup"), BreakOff())
except KeyboardInterrupt:
    tell("files", files("backup"))
tell("begun again", trained(backup("backup")))
tell("gone", not (folder / "backup").exists())
if "kept" in sys.argv:
    checkpoint = keras.callbacks.ModelCheckpoint(str(folder / "each/{epoch}/model.weights.h5"), save_weights_only=True)
    trained(backup("kept", delete_checkpoint=False, double_checkpoint=True), checkpoint)
    tell("kept", files("kept"))
    tell("each", files("each"))
