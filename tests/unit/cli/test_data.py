"""`whale-nebula data`: its output and exit status."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.unit.datasets.conftest import Owner, owner  # noqa: F401 - a fixture
from whale_nebula.cli import arguments, data
from whale_nebula.datasets.service import open_service
from whale_nebula.errors import ConfigError
from whale_nebula.security import authority
from whale_nebula.security.authority import Authority

Capture = pytest.CaptureFixture[str]
INTERFACE = """\
name: corpus
about: ages of people
source: {csv: "*.csv", columns: {age: int64}}
schema: {age: {dtype: int64}}
limits: {account: {rows: 1000}, run: {bytes: 1GB}, rate: 100mbit}
expires: 2999-01-01
"""


def run(line: str, capsys: Capture) -> tuple[int, str, str]:
    try:
        code = data.main(shlex.split(line))
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


def test_dataset_is_published_granted_and_withdrawn(owner: Owner, capsys: Capture) -> None:  # noqa: F811
    path, folder = owner.home / "files/corpus.yaml", f"--folder {owner.home}/certs"
    path.write_text(INTERFACE)
    assert run(f"list {folder}", capsys)[1].startswith("no datasets")
    code, out, _ = run(f"publish {path} {folder}", capsys)
    assert (code, out.splitlines()) == (
        0,
        [
            "published corpus: 100 rows, until 2999-01-01T00:00:00Z",
            "  schema: age int64[]",
            "  limits per account: 1000 rows in total, 1000000000 bytes per run, 100mbit",
            "  about: ages of people",
        ],
    )
    assert run(f"list {folder}", capsys)[1].split()[:2] == ["corpus", "published"]
    assert "no requests" in run(f"grants {folder}", capsys)[1]
    request = owner.grants.ask("ana", "corpus", "study")
    assert request.number in run(f"grants {folder}", capsys)[1]
    code, out, _ = run(f"grants --grant {request.number} --days 7 {folder} --json", capsys)
    assert json.loads(out)["state"] == "granted"
    assert "granted until" in run(f"show corpus {folder}", capsys)[1]
    assert "denied" in run(f"grants --deny {request.number} {folder}", capsys)[1]
    assert run(f"withdraw corpus {folder}", capsys)[1] == "withdrawn: corpus\n"
    assert json.loads(run(f"show corpus {folder} --json", capsys)[1])["state"] == "withdrawn"


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("", 2, "missing command: one of publish"),
        ("publsh", 2, "did you mean 'publish'"),
        ("--rows 3 publish", 2, "missing command before '--rows'"),
        ("publish", 2, "exactly one FILE"),
        ("publish a b", 2, "exactly one FILE"),
        ("list a", 2, "only options"),
        ("grants --grant 1 --deny 2 {folder}", 2, "cannot be combined"),
        ("grants --grant 1 {folder}", 1, "unknown request"),
        ("grants --grant 1 --days x {folder}", 2, "needs a number"),
        ("grants --grant 1 --days -1 {folder}", 1, "not a valid duration of a grant"),
        ("publish no.yaml {folder}", arguments.CONFIG, "cannot be read"),
        ("show corpus {folder}", 1, "unknown dataset"),
        ("list --folder nowhere", 1, "no authority in this folder"),
    ],
)
def test_data_command_exit_status(owner: Owner, capsys: Capture, line: str, code: int, message: str) -> None:  # noqa: F811
    status, _, err = run(line.format(folder=f"--folder {owner.home}/certs"), capsys)
    assert (status, message in err) == (code, True), err


def test_invalid_dataset_is_not_published(owner: Owner, tmp_path: Path, capsys: Capture) -> None:  # noqa: F811
    path, folder = owner.home / "files/corpus.yaml", f"--folder {owner.home}/certs"
    path.write_text(INTERFACE.replace("age: int64", "wage: int64"))
    code, _, err = run(f"publish {path} {folder}", capsys)
    assert (code, "missing column 'wage'" in err) == (1, True)
    path.write_text(INTERFACE.replace("2999", "2020"))
    assert "expired at" in run(f"publish {path} {folder}", capsys)[2]
    assert owner.grants.list_datasets() == []


def test_second_data_service_or_occupied_port_is_refused(owner: Owner, capsys: Capture) -> None:  # noqa: F811
    folder = owner.home / "certs"
    with open_service(folder, owner.signer, "gpu", "127.0.0.1", 0) as port:
        code, _, err = run(f"serve --folder {folder} --listen 127.0.0.1:0", capsys)
        assert (code, "the audit log is in use" in err) == (1, True)
        other = Authority.create("mt", {}, bound=["npu"])
        authority.create(owner.home / "npu", other)
        with pytest.raises(ConfigError, match="cannot listen"):
            open_service(owner.home / "npu", other, "npu", "127.0.0.1", port).__enter__()


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("request gpu://corpus --purpose x", 2, "missing data service: --at"),
        ("request corpus --at a:1 --purpose x", 2, "gpu://corpus"),
        ("request gpu://corpus --at a:1", 1, "missing certificate of an account"),
        ("list --at a:1", 2, "missing cluster: --cluster gpu"),
        ("list --at a:1 --cluster gpu --folder {certs}", 1, "missing certificate of an account"),
        ("serve --listen nowhere --folder {certs}", 2, "--listen needs HOST:PORT"),
    ],
)
def test_incomplete_service_command_is_refused(
    owner: Owner,  # noqa: F811
    capsys: Capture,
    line: str,
    code: int,
    message: str,
) -> None:
    status, _, err = run(line.format(certs=owner.home / "certs"), capsys)
    assert (status, message in err) == (code, True), err
