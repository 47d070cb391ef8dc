"""Runs the notebooks of examples/notebooks and writes them with their outputs.

    python tools/notebooks.py

A notebook is written as a `.py` in percent form and paired with its `.ipynb` by jupytext: the first is what is read,
changed and compared, the second what is shown.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
DEADLINE = 300


def executed(path: Path) -> Any:
    """The notebook of a `.py`, run from its first cell to its last in a kernel of its own."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # a drawn one would be another one each time
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=DEADLINE, kernel_name="python3", resources=where)
    client.execute(env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each cell ran
        if "outputs" in cell:  # what TensorFlow says of the machine when it is loaded is of no interest to readers
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def main() -> int:
    """Run and write all of them."""
    for path in sorted(NOTEBOOKS.glob("*.py")):
        nbformat.write(executed(path), path.with_suffix(".ipynb"))
        print(f"wrote {path.with_suffix('.ipynb').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
