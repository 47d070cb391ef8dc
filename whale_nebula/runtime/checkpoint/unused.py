"""Warnings at the end of a run about checkpoints that were not read or not written."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from whale_nebula.errors import NebulaWarning

if TYPE_CHECKING:
    from whale_nebula.runtime.checkpoint.checkpoints import Checkpoints


_LOG = logging.getLogger("whale_nebula.runtime.run")


def warn_of_unused(checkpoints: Checkpoints) -> None:
    """Log a warning if a script that ends without error has not trained the programs of its checkpoints."""
    if sys.exc_info()[0] is not None:
        return
    resumed, folder = checkpoints.resumed, checkpoints.levels[0].folder.path
    if resumed is not None and checkpoints.fits < resumed.fit:
        calls = f"fit {checkpoints.fits} time{'' if checkpoints.fits == 1 else 's'}"
        said = f"this run was in fit {resumed.fit} when it was saved, and now the script has called {calls}"
        why = f"it goes on in fit {resumed.fit}: those before have trained nothing, as the run had ended them"
        mend = "call fit as often where a run goes on as where it begins, without `if nb.resumed() is None:`"
    elif resumed is not None and not checkpoints.read:
        said = f"nothing was read of the checkpoint of step {resumed.step}"
        why = "no step was called, so models have the values that they were made with"
        mend = f"nb.restore({folder!r}, model) where a loop has nothing left to train"
    elif resumed is None and not checkpoints.known.names:
        said = "nothing was saved"
        why = "no model was trained by fit, and no step under @nb.function was called"
        mend = "@nb.function instead of @tf.function on a loop's step; without training, no checkpoint="
    else:
        return
    _LOG.warning("%s", NebulaWarning(said, where=folder, why=why, mend=mend))
