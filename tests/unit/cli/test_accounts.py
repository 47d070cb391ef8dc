"""Arguments of `whale-nebula accounts` and `login`; invalid ones give a message, and no traceback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from whale_nebula.cli.main import main
from whale_nebula.security import authority
from whale_nebula.security.authority import Authority

BROKEN = "\udcff"
"""An undecodable byte of a command line."""
AT = ("--cluster", "gpu", "--at", "127.0.0.1:1")
INVALID_COMMANDS: dict[str, tuple[Sequence[str], int, str]] = {
    "a name that cannot be encoded": (("accounts", "show", BROKEN), 1, "unknown account"),
    "an invalid name": (("accounts", "disable", "Ana"), 1, "unknown account 'Ana'"),
    "an invalid host": (("accounts", "serve", "--listen", f"{BROKEN}:7200"), 78, "the service cannot listen"),
    "another cluster": (("accounts", "serve", "--cluster", "npu", "--listen", "127.0.0.1:0"), 1, ", not npu"),
    "an invalid service host": (
        ("login", "--cluster", "gpu", "--at", f"{'a' * 70}.org:1", "--lists"), 1, "is unreachable"
    ),
    "an invalid certificate": (("login", *AT, "--run", "mt", "--lists", "--folder", "none"), 1, "valid certif"),
    "a binary file": (("login", *AT, "--run", "mt", "--lists", "--folder", "bytes"), 1, "valid certificate"),
    "an unreachable service": (("login", *AT, "--lists"), 1, "127.0.0.1:1 is unreachable"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "status", "message"), INVALID_COMMANDS.values(), ids=INVALID_COMMANDS)
def test_invalid_command_line_is_reported(
    words: Sequence[str],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    authority.create(Path("certs"), Authority.create("mt", {}, bound=["gpu"]))
    for name, data in (("none", b"garbage\n"), ("bytes", b"\xff\xfe")):
        Path(name).mkdir(0o700)
        (Path(name) / "ca.pem").write_bytes(data)
    assert main(words) == status
    assert message in capsys.readouterr().err


def test_token_scope_is_validated_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    authority.create(Path("certs"), Authority.create("mt", {}, bound=["gpu"]))
    assert main(["accounts", "add", "ana"]) == 0
    for words in (["--for", "owner"], ["--index", "1", "--count", "2"], ["--count", "0"], ["--hours", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(["accounts", "token", "ana", *words])
    assert main(["accounts", "token", "ana", "--for", "worker", "--count", "2", "--hours", "1.5"]) == 0
    assert "valid for worker 0 to 1, at most 1.5 hours" in capsys.readouterr().out
    assert main(["accounts", "show", "ana"]) == 0
    assert "Z, for worker 0 to 1, at most 1.5 hours" in capsys.readouterr().out
