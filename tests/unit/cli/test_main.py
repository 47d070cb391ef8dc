"""The command line has all its words; what is not built says so."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from whale_nebula.cli.exits import NOT_YET
from whale_nebula.cli.main import BUILT, COMMANDS, main

UNBUILT = [command for command in COMMANDS if command not in BUILT]


@pytest.mark.parametrize("command", UNBUILT)
def test_unbuilt_commands_say_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == NOT_YET
    assert f"NB-001 whale-nebula {command} is not built yet" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([UNBUILT[-1], "--json"]) == NOT_YET
    assert json.loads(capsys.readouterr().out)["code"] == "NB-001"


def test_help_lists_every_command_without_tensorflow() -> None:
    code = "import sys; from whale_nebula.cli.main import main; main([]); sys.exit('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", BUILT)
def test_a_built_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "examples:" in told and "exit status:" in told and f"whale-nebula {command}" in told


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["shw"])
    assert ended.value.code == 2
    assert "invalid choice" in capsys.readouterr().err
