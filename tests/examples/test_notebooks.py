"""The notebooks run completely, and match their `.py` files."""

import importlib.util
from pathlib import Path
from types import ModuleType

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.py"))


@pytest.fixture(scope="module")
def notebook_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def list_output_types(notebook: nbformat.NotebookNode) -> list[str]:
    """The kinds of things that it shows."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [kind for output in outputs for kind in output.get("data", {})]


@pytest.mark.grid  # a kernel of its own, for half a minute
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_images(path: Path, notebook_tool: ModuleType) -> None:
    found = list_output_types(notebook_tool.run_notebook(path))
    assert "image/svg+xml" in found and "image/png" in found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_matches_its_python_file(path: Path) -> None:
    source_notebook, made = jupytext.read(path), nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    assert [(cell.cell_type, cell.source) for cell in source_notebook.cells] == [
        (cell.cell_type, cell.source) for cell in made.cells
    ]
    assert "image/svg+xml" in list_output_types(made) and "image/png" in list_output_types(made)
