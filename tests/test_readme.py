"""The README is what a newcomer believes: its program runs, cut in two, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_first_program_trains_and_is_cut_as_it_says(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert program is not None
    (tmp_path / "train.py").write_text(program[1] + "\nprint(sorted(nb.last_report().stages))\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "['gpu', 'npu']"


def test_links_to_files_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert [each for each in targets if "://" not in each and not (ROOT / each).exists()] == []


def test_the_two_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in re.findall(r"^make (\w+)", README, re.MULTILINE) if f"\n{name}: " not in makefile] == []
