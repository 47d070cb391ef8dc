"""A trace that fails says so in our words: TensorFlow wraps our errors, and hides what a trace brings out."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import traceback
from collections.abc import Iterator

from whale_nebula.capture.places import foreign
from whale_nebula.errors import NebulaError, StaticBatchError

_REWRITTEN = "__autograph_generated_file"
"""How the files begin that hold AutoGraph's copies of the user's functions."""

_HINT = "whale_nebula: raised while the step was captured, where the number of rows is None until it runs"


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Around a trace: our errors come out as they were raised, a baked-in batch size as one of them."""
    try:
        yield
    except NebulaError:
        raise
    except Exception as error:
        ours = _wrapped(error)
        if ours is not None:
            raise ours from None
        line = _static_line(error)
        if line is not None:
            raise _static(error, line) from error
        error.add_note(_HINT)
        raise


def _wrapped(error: BaseException | None) -> NebulaError | None:
    """The error of ours that another one was made of."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, NebulaError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _static_line(error: Exception) -> str | None:
    """The user's line that reads a shape, where something could not be done with None."""
    if not isinstance(error, (TypeError, ValueError)) or "None" not in str(error):
        return None
    for file, line in reversed([*_frames(error), *_told(error)]):
        if not foreign(file) and not os.path.basename(file).startswith(_REWRITTEN):
            return f"{file}:{line}" if "shape" in linecache.getline(file, line) else None
    return None


def _frames(error: BaseException) -> list[tuple[str, int]]:
    """The frames of the error that was raised first."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]


def _told(error: BaseException) -> list[tuple[str, int]]:
    """The lines that AutoGraph's message names: it runs a rewritten copy of the user's code."""
    return [(file, int(line)) for file, line in re.findall(r'File "(.+?)", line (\d+)', str(error))]


def _static(error: Exception, line: str) -> StaticBatchError:
    return StaticBatchError(
        "the step reads the number of rows from a static shape",
        where=line,
        why=f"the batch's first axis is captured as None: {str(error).strip().splitlines()[-1].strip()}",
    )
