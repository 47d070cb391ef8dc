"""Runs the notebooks of examples/notebooks, and writes them with their outputs.

    python tools/notebooks.py

Each notebook is a `.py` file in percent format, which jupytext pairs with an `.ipynb` file. Edit the `.py` file; the
`.ipynb` file is generated.
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


def run_notebook(path: Path) -> Any:
    """Run the notebook of a `.py` file from start to end in its own kernel."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # a random id would change with each run
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=DEADLINE, kernel_name="python3", resources=where)
    client.execute(env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the time at which each cell ran
        if "outputs" in cell:  # messages of TensorFlow about the machine
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def main() -> int:
    """Run and write all notebooks."""
    for path in sorted(NOTEBOOKS.glob("*.py")):
        nbformat.write(run_notebook(path), path.with_suffix(".ipynb"))
        print(f"wrote {path.with_suffix('.ipynb').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
