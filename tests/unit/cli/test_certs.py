"""`whale-nebula certs`: its files and output, and that a refusal changes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from whale_nebula.cli import arguments, certs
from whale_nebula.security import Credentials, Files, Identity

CONFIG = """
run: mt
clusters:
  gpu: {workers: ["10.77.0.1:7101", "10.77.0.1:7102"], gateway: "10.77.0.1:7100"}
  npu: {workers: ["10.77.0.2:7101"]}
"""


class Shell:
    """Runs `whale-nebula certs` in a folder with a config."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: str) -> tuple[int, str, str]:
        try:
            code = certs.main(line.split())
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *self._capsys.readouterr()

    def check_output(self, line: str) -> str:
        code, out, err = self(line)
        assert (code, err) == (0, "")
        return out


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    Path("clusters.yaml").write_text(CONFIG)
    return Shell(capsys)


def read_all_files() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_init_and_issue_create_certificates_of_all_processes(shell: Shell) -> None:
    assert "certs/ca.key" in shell.check_output("init --config clusters.yaml")
    out = shell.check_output("issue --all --config clusters.yaml")
    for worker in ("gpu/0", "gpu/1", "gpu/gateway", "npu/0"):
        credentials = Credentials.load(Files.in_folder("certs", Identity.of_worker("mt", worker)))
        assert f"issued {worker}   serial {credentials.serial[:16]}" in out
        assert f"certs/{credentials.identity.stem}.key" in out
    assert "certs/revoked.json" in out


def test_printed_security_line_of_config_is_valid(shell: Shell) -> None:
    from whale_nebula.config import load

    shell.check_output("init --config clusters.yaml")
    out = shell.check_output("issue --cluster npu")
    line = next(line for line in out.splitlines() if "security:" in line).strip()
    Path("clusters.yaml").write_text(f"{CONFIG}{line}\n")
    config = load("clusters.yaml")
    assert Credentials.load(Files.from_config(config.security, Identity("mt", "npu"))).identity.worker == "npu/0"


def test_default_folder_is_next_to_the_config(shell: Shell) -> None:
    """A run looks for certificates there, too."""
    Path("site").mkdir()
    Path("clusters.yaml").rename("site/clusters.yaml")
    shell.check_output("init --config site/clusters.yaml")
    out = shell.check_output("issue --all --config site/clusters.yaml")
    assert "site/certs/gpu-worker-0.key" in out and not Path("certs").exists()
    assert "gpu/0" in shell.check_output("show --config site/clusters.yaml")
    assert "renewed gpu/1" in shell.check_output("renew --cluster gpu --index 1 --config site/clusters.yaml")
    assert shell("show")[0] == arguments.FAILED


def test_commands_print_json(shell: Shell) -> None:
    created = json.loads(shell.check_output("init --run mt --json"))
    assert (created["run"], created["authority"]["can_issue"]) == ("mt", True)
    issued = json.loads(shell.check_output("issue --cluster gpu --count 2 --json"))["issued"]
    assert [each["who"] for each in issued] == ["gpu/0", "gpu/1"]
    renewed = json.loads(shell.check_output("renew --cluster gpu --json"))["renewed"]
    assert renewed[0]["serial"] != issued[0]["serial"]
    revoked = json.loads(shell.check_output("revoke --cluster gpu --index 1 --why lost --json"))["revoked"]
    assert [(each["serial"], each["why"]) for each in revoked] == [(issued[1]["serial"], "lost")]
    document = json.loads(shell.check_output("show --json"))
    assert document["deny_list"] == {"number": 2, "certificates": 1}
    states = {each["serial"]: each["state"] for each in document["certificates"]}
    assert states == {issued[0]["serial"]: "replaced", renewed[0]["serial"]: "good", issued[1]["serial"]: "revoked"}
    assert json.loads(shell.check_output("renew --ca --json"))["authority"]["serial"] != created["authority"]["serial"]


def test_show_prints_a_table_without_colors_to_a_pipe(shell: Shell) -> None:
    shell.check_output("init --run mt")
    out = shell.check_output("show")
    assert "no certificates yet" in out and "deny list number 1: no certificates" in out
    shell.check_output("issue --cluster gpu")
    shell.check_output("issue --cluster gpu --role operator --index 3 --days 60")
    out = shell.check_output("show")
    assert "\x1b" not in out
    rows = [line.split() for line in out.splitlines()[4:]]
    assert [(row[0], row[-1]) for row in rows] == [("gpu/operator-3", "good"), ("gpu/0", "good")]
    assert "59 days" in out or "60 days" in out  # depending on the second


def test_show_works_without_the_authority_key(shell: Shell) -> None:
    shell.check_output("init --run mt")
    shell.check_output("issue --cluster gpu")
    os.unlink("certs/ca.key")
    for path in Path("certs/issued").iterdir():
        path.unlink()
    out = shell.check_output("show")
    assert "its key is on another host" in out
    assert "gpu/0" in out
    code, _, err = shell("issue --cluster npu")
    assert (code, "run this command on that host" in err) == (arguments.FAILED, True)


def test_worker_gets_a_new_key_after_revocation(shell: Shell) -> None:
    shell.check_output("init --run mt")
    shell.check_output("issue --cluster gpu")
    key = Path("certs/gpu-worker-0.key").read_bytes()
    shell.check_output("renew")
    assert shell.check_output("revoke --cluster gpu").count("revoked gpu/0") == 2
    assert "already revoked" in shell.check_output("revoke --cluster gpu")
    shell.check_output("issue --cluster gpu")
    assert Path("certs/gpu-worker-0.key").read_bytes() != key


def test_unreadable_certificate_is_reported_with_a_fix(shell: Shell) -> None:
    shell.check_output("init --run mt")
    shell.check_output("issue --cluster gpu --count 2")
    Path("certs/gpu-worker-1.pem").write_text("junk")
    code, _, err = shell("show")
    assert (code, "the certificate of gpu/1 cannot be read" in err) == (arguments.FAILED, True)
    assert "mv certs/gpu-worker-1.pem certs/gpu-worker-1.pem.broken, then whale-nebula certs renew --cluster gpu" in err
    Path("certs/gpu-worker-1.pem").rename("certs/gpu-worker-1.pem.broken")
    shell.check_output("renew --cluster gpu --index 1")
    assert Credentials.load(Files.in_folder("certs", Identity("mt", "gpu", "worker", 1))).identity.worker == "gpu/1"


def test_moved_certificate_is_still_listed_and_renewable(shell: Shell) -> None:
    shell.check_output("init --run mt")
    shell.check_output("issue --cluster gpu")
    for path in Path("certs").glob("gpu-worker-0.*"):
        path.rename(path.name)
    assert shell("issue --cluster gpu")[0] == arguments.FAILED
    assert [each["state"] for each in json.loads(shell.check_output("show --json"))["certificates"]] == ["good"]
    assert "renewed gpu/0" in shell.check_output("renew")
    assert Path("certs/gpu-worker-0.pem").exists() and not Path("certs/gpu-worker-0.key").exists()
    assert shell.check_output("revoke --cluster gpu").count("revoked gpu/0") == 2
    shell.check_output("issue --cluster gpu")


def test_revoke_by_serial_prefix(shell: Shell) -> None:
    shell.check_output("init --run mt")
    serial = json.loads(shell.check_output("issue --cluster gpu --json"))["issued"][0]["serial"]
    assert "revoked gpu/0" in shell.check_output(f"revoke --serial {serial[:8].upper()}")


def test_renew_revoked_signs_the_deny_list_again(shell: Shell) -> None:
    shell.check_output("init --run mt")
    assert "copy to every host: certs/revoked.json   now number 2" in shell.check_output("renew --revoked")
    assert json.loads(shell.check_output("renew --revoked --json")) == {"deny_list": {"number": 3, "certificates": 0}}
    assert "deny list number 3: no certificates" in shell.check_output("show")
    Path("certs/revoked.json").unlink()
    assert "no deny list here" in shell.check_output("show")


def test_certificate_clipped_by_its_authority_gives_a_warning(shell: Shell) -> None:
    shell.check_output("init --run mt --days 2")
    code, _, err = shell("issue --cluster gpu")
    assert (code, "renew --ca" in err) == (0, True)


def test_new_cluster_is_read_from_the_config(shell: Shell) -> None:
    shell.check_output("init --config clusters.yaml")
    Path("clusters.yaml").write_text(CONFIG + '  tpu: {workers: ["10.77.0.3:7101"]}\n')
    assert shell("issue --cluster tpu")[0] == arguments.FAILED
    shell.check_output("issue --cluster tpu --config clusters.yaml")
    shell.check_output("issue --cluster tpu --role gateway")


REFUSED_COMMANDS = {
    # command line: (exit status, expected message)
    "": (2, "one of init, issue"),
    "isue": (2, "did you mean 'issue'"),
    "issue --clutser gpu": (2, "did you mean '--cluster'"),
    "issue": (2, "missing process"),
    "issue --all": (2, "--config clusters.yaml"),
    "issue --role gateway": (2, "missing cluster"),
    "issue --cluster gpu --role gatway": (2, "did you mean 'gateway'"),
    "issue --cluster gpu --index 0 --count 2": (2, "cannot be combined"),
    "issue --cluster gpu --index -1": (2, "needs a number"),
    "issue --cluster gpu --count 65536": (2, "needs a number from 0 to 65535"),
    "issue --cluster gpu --index x": (2, "not 'x'"),
    "issue --cluster gpu --count 0": (2, "at least 1"),
    "issue --cluster gpu --role gateway --count 2": (2, "one gateway"),
    "issue --cluster gpu --days week": (2, "not 'week'"),
    "issue --cluster gpu --index 1 --days 0": (1, "0 days"),
    "issue --cluster gpuu": (1, "did you mean 'gpu'"),
    "issue --cluster gpu --index 7": (1, "has no worker 7"),
    "issue --cluster gpu --count 2": (1, "gpu/0 already has a certificate"),
    "issue --cluster ../x": (1, "not a valid cluster name"),
    "issue --cluster gpu --config no.yaml": (78, "no.yaml"),
    "issue --cluster gpu --index 1 --config other.yaml": (1, "for run 'other'"),
    "issue --cluster gpu --folder nowhere": (1, "certs init"),
    "init --config clusters.yaml": (1, "already"),
    "init": (2, "missing run name"),
    "init --run b --config clusters.yaml": (2, "remove --run"),
    "init --run ../x --folder new": (1, "not a valid run name"),
    "init --run mt --days 0 --folder new": (1, "0 days"),
    "renew --cluster npu": (1, "no certificate of npu/0"),
    "renew --cluster npu --index 3": (1, "certs issue --cluster npu --index 3"),
    "renew --cluster npu --role gateway": (1, "certs issue --cluster npu --role gateway"),
    "renew --ca --cluster gpu": (2, "remove --cluster"),
    "renew --revoked --cluster gpu": (2, "remove --cluster"),
    "renew --ca --days -5": (1, "-5 days"),
    "revoke": (2, "missing certificate"),
    "revoke --cluster gpu --serial 00": (2, "missing certificate"),
    "revoke --cluster npu": (1, "no certificate here"),
    "revoke --serial zz": (1, "no certificate has a serial"),
    "show --folder nowhere": (1, "certs init --run NAME --folder nowhere"),
}


def test_refused_commands_report_why_and_change_no_file(shell: Shell) -> None:
    Path("other.yaml").write_text("run: other")
    shell.check_output("init --config clusters.yaml")
    shell.check_output("issue --cluster gpu")
    before = read_all_files()
    for line, (code, message) in REFUSED_COMMANDS.items():
        status, out, err = shell(line)
        assert (status, out) == (code, ""), line
        assert message in err, (line, err)
    assert read_all_files() == before
    assert not Path("new").exists()


def test_refusal_is_printed_as_json(shell: Shell) -> None:
    code, out, _ = shell("issue --cluster gpu --json")
    assert (code, json.loads(out)["code"]) == (arguments.FAILED, "NB-428")


def test_certs_commands_have_help(shell: Shell) -> None:
    for command in ("init", "issue", "show", "renew", "revoke"):
        out = shell.check_output(f"{command} --help")
        assert f"whale-nebula certs {command}" in out and "--folder" in out
