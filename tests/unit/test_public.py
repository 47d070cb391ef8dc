"""The public API as a contract: names, signatures, docstrings, error codes. It changes by addition only."""

import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import whale_nebula as nb
from whale_nebula.errors import NebulaError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "whale_nebula"

COMPRESS = (
    "(codec=None, *, svd=None, rank=None, topk=None, fp16=False, bf16=False, int8=False, int4=False,"
    " backward='default', start_step=0, ramp=None, basis='shared', delta=None,"
    " mask=None, forward=None, zstd=False, nonfinite='raise')"
)
SIGNATURES = {
    "init": "(config=None, *, links=None, seed=None, ids=None, plan=None, show=None, metrics=None, tensorboard=None,"
    " outputs=None, checkpoint=None)",
    "save": "(path, model)",
    "restore": "(path, model)",
    "resumed": "()",
    "state": "(**objects)",
    "shutdown": "()",
    "here": "()",
    "data": "(source, *, batch, seed=None, purpose=None, drop_remainder=False)",
    "cluster": "(layout='all', *, name=None)",
    "replica": "(count=None, *, sync_every=None, outer='average', mode='sync', fragments=None, delay=None, "
    "staleness=None, shard=None, exchange=None)",
    "stage": "(*, cluster=None, name=None)",
    "pipeline": "(micro_batch=None, *, schedule='eager-1f1b', in_flight=None, recompute=False, coupled='error')",
    "split": "(count=None, *, axis=-1)",
    "compress": COMPRESS,
    "auto_parallel": (
        "(*, clusters=None, memory=None, micro_batch=None, replica=None, split=None, compress='none', recompute=None, "
        "replan=False)"
    ),
    "loss_weight": "(tensor)",
    "plan": "(model_or_function, *example)",
    "verify": "(model_or_function, *batch)",
    "last_report": "(program=None)",
    "clusters": "(source=None)",
}
NAMES = {*SIGNATURES, "place", "function", "Plan", "Run", "Report", "Verification", "codec", "errors", "outer"}


def library_modules() -> list[str]:
    paths = sorted(PACKAGE.rglob("*.py"))
    parts = (path.relative_to(PACKAGE.parent).with_suffix("").parts for path in paths)
    return [".".join(part for part in each if part != "__init__") for each in parts if each[-1] != "__main__"]


def subclasses(kind: type[NebulaError]) -> set[type[NebulaError]]:
    return {kind}.union(*(subclasses(each) for each in kind.__subclasses__()))


def list_errors() -> list[type[NebulaError]]:
    for name in library_modules():
        importlib.import_module(name)
    ours = [each for each in subclasses(NebulaError) if each.__module__.startswith("whale_nebula")]
    found = [each for each in ours if not each.__name__.startswith("_")]  # private subclasses of public errors
    return sorted(found, key=lambda each: each.__name__)


def format_signature(signature: inspect.Signature) -> str:
    """Names, kinds and defaults; no annotations."""
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_subpackage_does_not_hide_a_public_name() -> None:
    packages = [name for name in nb.__all__ if (PACKAGE / name).is_dir() and name not in ("codec", "errors")]
    assert packages == ["plan"]
    importlib.import_module("whale_nebula.plan")
    assert callable(nb.plan)


def test_contract_names_are_public() -> None:
    assert NAMES - set(nb.__all__) == set()


@pytest.mark.parametrize("name", sorted(nb.__all__))
def test_public_names_have_docstrings(name: str) -> None:
    thing = getattr(nb, name)
    if not name.startswith("__"):
        docstring = thing.__doc__ or ""
        assert len(docstring.split()) >= 4, f"nb.{name} has no docstring"
        assert not docstring.startswith(f"{name}("), f"nb.{name} has only the docstring that dataclasses make"


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items())
def test_signatures_match_the_contract(name: str, expected: str) -> None:
    assert format_signature(inspect.signature(getattr(nb, name))) == expected


def test_error_codes_are_unique() -> None:
    codes = {each.__name__: each.code for each in list_errors()}
    assert {name: code for name, code in codes.items() if not re.fullmatch(r"NB-\d{3}", code)} == {}
    count = Counter(codes.values())
    assert {name: code for name, code in codes.items() if count[code] > 1} == {}


def test_errors_have_docstrings() -> None:
    assert [each.__name__ for each in list_errors() if not each.__dict__.get("__doc__")] == []


def test_scopes_config_codecs_and_errors_load_no_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys, whale_nebula as nb, whale_nebula.config\n"
        "nb.codec.SVD(0.6); nb.errors.NebulaError\n"
        "with nb.cluster(), nb.stage(cluster='gpu'), nb.compress(fp16=True): pass\n"
        "print(*sorted({'tensorflow', 'keras', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_version_matches_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert nb.__version__ == project["version"]


def test_dir_lists_exactly_the_public_names() -> None:
    _ = nb.stage  # loads what is behind it
    assert [name for name in dir(nb) if not name.startswith("__")] == sorted({*nb.__all__} - {"__version__"})
    assert len(nb.__all__) == len(set(nb.__all__))
    assert {"__version__", "__doc__", "__path__"} <= set(dir(nb))


def test_misspelt_public_name_gets_a_suggestion() -> None:
    with pytest.raises(AttributeError, match="did you mean 'pipeline'"):
        _ = nb.pipelin
    assert not hasattr(nb, "nothing_like_it")
