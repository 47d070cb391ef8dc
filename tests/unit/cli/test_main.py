"""The command line has all its words; what is not built says so."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from whale_nebula.cli.main import COMMANDS, EXIT_NOT_YET, main


@pytest.mark.parametrize("command", COMMANDS)
def test_unbuilt_commands_say_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == EXIT_NOT_YET
    assert f"NB-001 whale-nebula {command} is not built yet" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--json"]) == EXIT_NOT_YET
    assert json.loads(capsys.readouterr().out)["code"] == "NB-001"


def test_help_lists_every_command_without_tensorflow() -> None:
    code = "import sys; from whale_nebula.cli.main import main; main([]); sys.exit('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["shw"])
    assert ended.value.code == 2
    assert "invalid choice" in capsys.readouterr().err
