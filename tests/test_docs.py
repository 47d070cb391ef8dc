"""The documentation: links exist, programs run, every error has its section, and it builds."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import zygote
from whale_nebula import errors
from whale_nebula.config import Line, quantities, schema
from whale_nebula.wire.frame import Kind
from whale_nebula.wire.message import Trigger

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BENCHMARKS = sorted(script.parent.name for script in (ROOT / "benchmarks").glob("*/run.py"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGES_WITH_PROGRAMS = ("codecs", "seeing", "metrics", "clusters-object")
"""Pages other than those of scopes that begin with a program."""


def list_anchors(text: str) -> set[str]:
    """The names that headings can be linked by."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_links_resolve() -> None:
    broken = []
    links = ((page, target) for page in PAGES for target in LINK.findall(CODE.sub("", page.read_text())))
    for page, target in links:
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        outside = not found.is_relative_to(DOCS)  # the site has no such page
        if outside or not found.exists() or (anchor and anchor not in list_anchors(found.read_text())):
            broken.append(f"{page.relative_to(DOCS)}: {target}")
    assert broken == []


def test_pages_are_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text() + (DOCS / "decisions.md").read_text()
    own = [str(page.relative_to(DOCS)) for page in PAGES if page.name != "0000-template.md"]
    assert [name for name in own if name not in navigation] == []


def test_security_page_lists_all_kinds_of_messages_and_frames() -> None:
    section = (DOCS / "security.md").read_text().partition("## What a peer learns")[2].partition("\n## ")[0]
    named = set(re.findall(r"[A-Z]+", " ".join(re.findall(r"^\| ([^|]*)", section, re.MULTILINE))))
    alike = {"INIT": "HELLO", "NOTE": "LEAVING", "TENSOR": "BOUNDARY", "CONTROL": "FAIL"}
    assert [name for name in (*Trigger, *(kind.name for kind in Kind)) if alike.get(name, name) not in named] == []


def test_errors_have_sections() -> None:
    codes = {thing.code for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, Exception)}
    sections = re.findall(r"^## (NB-\d+)\n`(\w+)`", (DOCS / "failures.md").read_text(), re.MULTILINE)
    assert sorted(code for code, _ in sections) == sorted(codes)
    assert {code: getattr(errors, name).code for code, name in sections} == {code: code for code, _ in sections}


def test_names_of_the_reference_exist() -> None:
    names = [name for page in PAGES for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE)]
    assert names
    for name in names:
        module, _, thing = name.rpartition(".")
        assert hasattr(importlib.import_module(module), thing), name


def test_programs_of_the_first_page_run(tmp_path: Path) -> None:
    """All programs of the first page, one after another, as a newcomer pastes them."""
    program = "\n".join(CODE.findall((DOCS / "index.md").read_text()))
    strict = "import warnings\nwarnings.filterwarnings('error', category=UserWarning, module='__main__')\n"
    (tmp_path / "train.py").write_text(strict + program)
    done = zygote.run("train.py", cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stage gpu" in done.stdout


@pytest.mark.grid
@pytest.mark.parametrize(
    "page",
    [*sorted(DOCS.glob("scopes/*.md")), *(DOCS / f"{each}.md" for each in PAGES_WITH_PROGRAMS)],
    ids=lambda page: page.stem,
)
def test_first_program_of_a_page_runs_without_warnings(page: Path, tmp_path: Path) -> None:
    strict = "import warnings\nwarnings.filterwarnings('error', category=UserWarning, module='__main__')\n"
    (tmp_path / "train.py").write_text(strict + CODE.findall(page.read_text())[0])
    done = zygote.run("train.py", cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.grid
def test_uncut_option_of_the_page_gives_equal_losses(tmp_path: Path) -> None:
    program = next(each for each in CODE.findall((DOCS / "scripts.md").read_text()) if "--uncut" in each)
    (tmp_path / "train.py").write_text(program + "\nif cut:\n    assert nb.last_report().micro_batches == 4\n")
    losses = []
    for words in ([], ["--uncut"]):
        command = [sys.executable, "train.py", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append(json.loads(done.stdout.splitlines()[-1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 2


def test_programs_of_the_config_page_print_what_it_shows(tmp_path: Path) -> None:
    """Its config is loaded, and its programs print the text of their comments."""
    page = (DOCS / "clusters-yaml.md").read_text()
    yaml = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert yaml is not None
    (tmp_path / "clusters.yaml").write_text(yaml[1])
    programs = CODE.findall(page)
    assert len(programs) == 2
    shown = [comment for program in programs for comment in re.findall(r"print\(.*\)  # (.*)", program)]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(programs)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == shown


def test_config_page_lists_all_keys() -> None:
    page = (DOCS / "clusters-yaml.md").read_text()
    kinds = (schema.Config, schema.Cluster, schema.WorkerSpec, schema.Security, schema.InputSpec, Line)
    keys = {field.name for kind in kinds for field in dataclasses.fields(kind)} - {"name"} | {"between"}
    first = "".join(line.partition("|")[2].partition("|")[0] for line in page.splitlines() if line.startswith("|"))
    assert [key for key in sorted(keys) if not re.search(rf"\b{key}\b", first)] == []


def test_config_page_lists_all_units() -> None:
    page = (DOCS / "clusters-yaml.md").read_text()
    for row, units in (("rate", quantities._RATES), ("time", quantities._TIMES)):
        found = re.search(rf"^\| {row} \|(.*?)\|", page, re.MULTILINE)
        assert found is not None
        shown = set(re.findall(r"`(\w+)`", found[1]))
        assert shown == set(units) - {"µs"}


def test_schedule_pictures_match_the_drawings() -> None:
    from whale_nebula.schedule.simulate import draw_schedule

    page = (DOCS / "how-a-step-crosses.md").read_text()
    for name in ("gpipe", "1f1b", "eager-1f1b", "zero-bubble"):
        assert draw_schedule(name, stages=2, micro_batches=4, seconds=1.0, width=90) in page, name
    page = (DOCS / "scopes" / "pipeline.md").read_text()
    for name in ("eager-1f1b", "zero-bubble"):
        assert draw_schedule(name, stages=4, micro_batches=6) in page, name


@pytest.mark.grid
def test_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "NB-101" in (tmp_path / "site" / "failures.html").read_text()
    measured = (tmp_path / "site" / "measured.html").read_text()
    assert measured.count("<table>") == len(BENCHMARKS) and "table:" not in measured


def test_measured_page_and_readme_list_all_benchmarks() -> None:
    page = (DOCS / "measured.md").read_text()
    assert sorted(re.findall(r"^<!-- table: (\w+) -->$", page, re.MULTILINE)) == BENCHMARKS
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert set(re.findall(r"^\| \[(\w+)\]\(\1/\) \|", readme, re.MULTILINE)) >= set(BENCHMARKS)
