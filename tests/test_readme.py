"""The README: its program runs, cut in two, and its links exist."""

import re
from pathlib import Path

from tests.processes import zygote
from tests.test_docs import list_anchors

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_programs_pasted_in_order_run_in_two_stages(tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(programs) == 2
    (tmp_path / "train.py").write_text("\n".join([*programs, "print(sorted(nb.last_report().stages))"]))
    done = zygote.run("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "['gpu', 'npu']" and "match the uncut step" in done.stdout


def test_readme_links_resolve() -> None:
    targets = [each.partition("#") for each in re.findall(r"\]\(([^)]+)\)", README) if "://" not in each]
    assert [name for name, _, _ in targets if not (ROOT / name).exists()] == []
    named = [(name, anchor) for name, _, anchor in targets if anchor]
    assert [each for each in named if each[1] not in list_anchors((ROOT / each[0]).read_text())] == []


def test_make_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in re.findall(r"^make (\w+)", README, re.MULTILINE) if f"\n{name}: " not in makefile] == []
