"""Arguments of `whale-nebula accounts` and `login`; invalid ones give a message, and no traceback."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from whale_nebula.accounts.registry import Registry
from whale_nebula.cli.main import main
from whale_nebula.security import authority, issue
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


def test_certificate_changes_of_the_owner_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    authority.create(Path("certs"), Authority.create("mt", {}, bound=["gpu"]))
    authority.create(Path("other"), Authority.create("mt", {}, bound=["npu"]))
    lines = [
        "certs issue --cluster gpu", "accounts add ana", "certs renew", "certs issue --cluster gpu --role gateway",
        "certs revoke --cluster gpu --why sold", "certs request --run mt --cluster gpu --index 1 --folder host",
        "certs sign host/gpu-worker-1.csr --folder certs", "certs trust --ca other/ca.pem --list other/revoked.json",
    ]  # fmt: skip
    main(["certs", "renew", "--ca", "--folder", "other"])
    issue.renew_deny_list(Path("other"), authority.load(Path("other")))
    for line in lines:
        assert main(line.split()) == 0, (line, capsys.readouterr().err)
    events = Registry(Path("certs"), authority.load(Path("certs"))).list_events()
    found = [(each["action"], each["reason"], each["changed"]) for each in events if "changed" in each]
    assert [action for action, *_ in found] == [
        f"certs {each}" for each in ("renew", "issue", "revoke", "sign", "trust")
    ]
    assert found[2][1] == "sold" and all(each.startswith("gpu") for each in (found[1][2][0], found[3][2][0]))
    assert all(each["by"] for each in events if "changed" in each)
    capsys.readouterr()
    assert main(["audit", "report"]) == 0
    assert f"certs revoke  by {found and events[-1]['by']}  reason sold  " in capsys.readouterr().out
    modified = sqlite3.connect("certs/accounts.db")
    with modified:
        modified.execute("update account set workers = 99")
    modified.close()
    assert main(["certs", "revoke", "--cluster", "gpu", "--index", "1"]) == 0  # a revocation is never prevented
    assert "this change is not in the log of the accounts: NB-431" in capsys.readouterr().err
