"""The command line has all its words."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from whale_nebula.cli.main import COMMANDS, main


def test_help_lists_every_command_without_tensorflow() -> None:
    code = "import sys; from whale_nebula.cli.main import main; main([]); sys.exit('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_built_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "examples:" in told and "exit status:" in told and f"whale-nebula {command}" in told


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in `whale-nebula doctor | head -1`."""
    command = [sys.executable, "-m", "whale_nebula.cli.main", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (128 + signal.SIGPIPE, "")


def test_python_m_is_the_command_too() -> None:
    command = [sys.executable, "-m", "whale_nebula", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()[0]) == (0, "whale-nebula")


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["shw"])
    assert ended.value.code == 2
    assert "there is no command 'shw'; did you mean 'show'?" in capsys.readouterr().err
