"""`models/` and `strategies/` lie at the top of the clone and are installed inside the package."""

import subprocess
import sys
import tomllib
from pathlib import Path
from subprocess import PIPE

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAPPED_FOLDERS = {"whale_nebula.models": "models", "whale_nebula.strategies": "strategies"}


@pytest.mark.parametrize(("package", "folder"), MAPPED_FOLDERS.items())
def test_mapped_package_is_found_from_any_directory(package: str, folder: str, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print(u.find_spec({package!r}).origin)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=PIPE, text=True, timeout=60)
    assert done.stdout.strip() == str(ROOT / folder / "__init__.py")


@pytest.mark.parametrize("folder", MAPPED_FOLDERS.values())
def test_mapped_folder_is_not_a_top_level_package(folder: str, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print(u.find_spec({folder!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=PIPE, text=True, timeout=60)
    assert done.stdout.strip() == "None"


def test_mapping_is_declared_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["tool"]["setuptools"]["package-dir"]
    assert {name: folder for name, folder in declared.items() if name != "whale_nebula"} == MAPPED_FOLDERS


def test_source_folders_are_packages() -> None:
    tops = [ROOT / top for top in ("whale_nebula", *MAPPED_FOLDERS.values())]
    folders = {path.parent for top in tops for path in top.rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_lock_file_has_hashes_and_no_urls() -> None:
    lines = (ROOT / "requirements-dev.lock").read_text().splitlines()
    pins = [line for line in lines if "==" in line]
    assert len(pins) > 50
    assert [line for line in pins if not line.endswith("\\")] == []
    assert [line for line in lines if "://" in line or line.startswith("-")] == []
