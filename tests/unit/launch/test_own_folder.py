"""Folders of one run: gone with it, and gone with the next one if it was killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from whale_nebula.launch.gateways import PREFIX, own_folder, remove_abandoned

HOLDS = """
import signal, sys
from whale_nebula.launch.gateways import own_folder
with own_folder(sys.argv[1]) as folder:
    (folder / "gpu-worker-0.key").write_text("secret")
    print(folder, flush=True)
    signal.pause()
"""


def test_it_is_this_users_alone_and_gone_at_the_end(tmp_path: Path) -> None:
    with own_folder(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "deep").mkdir()
        (folder / "deep" / "key").write_text("secret")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_has_left_goes_with_the_next_and_what_lives_stays(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with own_folder(tmp_path):
            assert left.is_dir()
        other.send_signal(signal.SIGKILL)
        other.wait(20)
    assert (left / "gpu-worker-0.key").is_file()
    with own_folder(tmp_path) as fresh:
        assert list(tmp_path.iterdir()) == [fresh]


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "in-use").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    begun = tmp_path / f"{PREFIX}begun"  # by one that has not come to its lock yet
    begun.mkdir()
    remove_abandoned(tmp_path)
    assert (elsewhere / "in-use").is_file() and begun.is_dir() and os.path.islink(tmp_path / f"{PREFIX}link")
