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
    """A folder with a config, in which the command is called."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: str) -> tuple[int, str, str]:
        try:
            code = certs.main(line.split())
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *self._capsys.readouterr()

    def good(self, line: str) -> str:
        code, out, err = self(line)
        assert (code, err) == (0, "")
        return out


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    Path("clusters.yaml").write_text(CONFIG)
    return Shell(capsys)


def place_all_workers() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_from_nothing_to_certificates_of_all(shell: Shell) -> None:
    assert "certs/ca.key" in shell.good("init --config clusters.yaml")
    out = shell.good("issue --all --config clusters.yaml")
    for worker in ("gpu/0", "gpu/1", "gpu/gateway", "npu/0"):
        found = Credentials.of(Files.under("certs", Identity.of_worker("mt", worker)))
        assert f"issued {worker}   serial {found.serial[:16]}" in out
        assert f"certs/{found.identity.stem}.key" in out
    assert "certs/revoked.json" in out


def test_what_it_prints_as_the_configs_line_leads_to_the_files(shell: Shell) -> None:
    from whale_nebula.config import load

    shell.good("init --config clusters.yaml")
    out = shell.good("issue --cluster npu")
    line = next(line for line in out.splitlines() if "security:" in line).strip()
    Path("clusters.yaml").write_text(f"{CONFIG}{line}\n")
    config = load("clusters.yaml")
    assert Credentials.of(Files.of(config.security, Identity("mt", "npu"))).identity.worker == "npu/0"


def test_a_config_elsewhere_has_its_certificates_beside_it(shell: Shell) -> None:
    """Which is where a run looks for them."""
    Path("site").mkdir()
    Path("clusters.yaml").rename("site/clusters.yaml")
    shell.good("init --config site/clusters.yaml")
    out = shell.good("issue --all --config site/clusters.yaml")
    assert "site/certs/gpu-worker-0.key" in out and not Path("certs").exists()
    assert "gpu/0" in shell.good("show --config site/clusters.yaml")
    assert "renewed gpu/1" in shell.good("renew --cluster gpu --index 1 --config site/clusters.yaml")
    assert shell("show")[0] == arguments.FAILED


def test_json(shell: Shell) -> None:
    made = json.loads(shell.good("init --run mt --json"))
    assert (made["run"], made["authority"]["can_issue"]) == ("mt", True)
    issued = json.loads(shell.good("issue --cluster gpu --count 2 --json"))["issued"]
    assert [each["who"] for each in issued] == ["gpu/0", "gpu/1"]
    renewed = json.loads(shell.good("renew --cluster gpu --json"))["renewed"]
    assert renewed[0]["serial"] != issued[0]["serial"]
    revoked = json.loads(shell.good("revoke --cluster gpu --index 1 --why lost --json"))["revoked"]
    assert [(each["serial"], each["why"]) for each in revoked] == [(issued[1]["serial"], "lost")]
    shown = json.loads(shell.good("show --json"))
    assert shown["deny_list"] == {"number": 2, "certificates": 1}
    states = {each["serial"]: each["state"] for each in shown["certificates"]}
    assert states == {issued[0]["serial"]: "replaced", renewed[0]["serial"]: "good", issued[1]["serial"]: "revoked"}
    assert json.loads(shell.good("renew --ca --json"))["authority"]["serial"] != made["authority"]["serial"]


def test_show_is_a_table_without_colours_in_a_pipe(shell: Shell) -> None:
    shell.good("init --run mt")
    out = shell.good("show")
    assert "no certificates yet" in out and "deny list number 1: no certificates" in out
    shell.good("issue --cluster gpu")
    shell.good("issue --cluster gpu --role operator --index 3 --days 60")
    out = shell.good("show")
    assert "\x1b" not in out
    rows = [line.split() for line in out.splitlines()[4:]]
    assert [(row[0], row[-1]) for row in rows] == [("gpu/operator-3", "good"), ("gpu/0", "good")]
    assert "59 days" in out or "60 days" in out  # in the second in which it was made


def test_show_works_where_the_authoritys_key_is_not(shell: Shell) -> None:
    shell.good("init --run mt")
    shell.good("issue --cluster gpu")
    os.unlink("certs/ca.key")
    for path in Path("certs/issued").iterdir():
        path.unlink()
    out = shell.good("show")
    assert "its key is on another host" in out
    assert "gpu/0" in out
    code, _, err = shell("issue --cluster npu")
    assert (code, "run this command on that host" in err) == (arguments.FAILED, True)


def test_a_revoked_worker_gets_a_new_key(shell: Shell) -> None:
    shell.good("init --run mt")
    shell.good("issue --cluster gpu")
    key = Path("certs/gpu-worker-0.key").read_bytes()
    shell.good("renew")
    assert shell.good("revoke --cluster gpu").count("revoked gpu/0") == 2
    assert "already revoked" in shell.good("revoke --cluster gpu")
    shell.good("issue --cluster gpu")
    assert Path("certs/gpu-worker-0.key").read_bytes() != key


def test_a_certificate_that_does_not_read_is_named_with_what_mends_it(shell: Shell) -> None:
    shell.good("init --run mt")
    shell.good("issue --cluster gpu --count 2")
    Path("certs/gpu-worker-1.pem").write_text("junk")
    code, _, err = shell("show")
    assert (code, "the certificate of gpu/1 cannot be read" in err) == (arguments.FAILED, True)
    assert "mv certs/gpu-worker-1.pem certs/gpu-worker-1.pem.broken, then whale-nebula certs renew --cluster gpu" in err
    Path("certs/gpu-worker-1.pem").rename("certs/gpu-worker-1.pem.broken")
    shell.good("renew --cluster gpu --index 1")
    assert Credentials.of(Files.under("certs", Identity("mt", "gpu", "worker", 1))).identity.worker == "gpu/1"


def test_files_that_were_moved_to_their_host_are_still_somebodys(shell: Shell) -> None:
    shell.good("init --run mt")
    shell.good("issue --cluster gpu")
    for path in Path("certs").glob("gpu-worker-0.*"):
        path.rename(path.name)
    assert shell("issue --cluster gpu")[0] == arguments.FAILED
    assert [each["state"] for each in json.loads(shell.good("show --json"))["certificates"]] == ["good"]
    assert "renewed gpu/0" in shell.good("renew")
    assert Path("certs/gpu-worker-0.pem").exists() and not Path("certs/gpu-worker-0.key").exists()
    assert shell.good("revoke --cluster gpu").count("revoked gpu/0") == 2
    shell.good("issue --cluster gpu")


def test_by_serial(shell: Shell) -> None:
    shell.good("init --run mt")
    serial = json.loads(shell.good("issue --cluster gpu --json"))["issued"][0]["serial"]
    assert "revoked gpu/0" in shell.good(f"revoke --serial {serial[:8].upper()}")


def test_the_deny_list_is_signed_anew(shell: Shell) -> None:
    shell.good("init --run mt")
    assert "copy to every host: certs/revoked.json   now number 2" in shell.good("renew --revoked")
    assert json.loads(shell.good("renew --revoked --json")) == {"deny_list": {"number": 3, "certificates": 0}}
    assert "deny list number 3: no certificates" in shell.good("show")
    Path("certs/revoked.json").unlink()
    assert "no deny list here" in shell.good("show")


def test_a_certificate_that_is_cut_short_by_its_authority_is_told(shell: Shell) -> None:
    shell.good("init --run mt --days 2")
    code, _, err = shell("issue --cluster gpu")
    assert (code, "renew --ca" in err) == (0, True)


def test_a_new_cluster_is_taken_from_the_config(shell: Shell) -> None:
    shell.good("init --config clusters.yaml")
    Path("clusters.yaml").write_text(CONFIG + '  tpu: {workers: ["10.77.0.3:7101"]}\n')
    assert shell("issue --cluster tpu")[0] == arguments.FAILED
    shell.good("issue --cluster tpu --config clusters.yaml")
    shell.good("issue --cluster tpu --role gateway")


REFUSED = {
    # the line, how it ends, and what it says
    "": (2, "one of init, issue"),
    "isue": (2, "did you mean 'issue'"),
    "issue --clutser gpu": (2, "did you mean '--cluster'"),
    "issue": (2, "missing process"),
    "issue --all": (2, "--config clusters.yaml"),
    "issue --role gateway": (2, "missing cluster"),
    "issue --cluster gpu --role gatway": (2, "did you mean 'gateway'"),
    "issue --cluster gpu --index 0 --count 2": (2, "cannot be combined"),
    "issue --cluster gpu --index -1": (2, "needs a number"),
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


def test_refusals_change_nothing_and_say_why(shell: Shell) -> None:
    Path("other.yaml").write_text("run: other")
    shell.good("init --config clusters.yaml")
    shell.good("issue --cluster gpu")
    before = place_all_workers()
    for line, (code, said) in REFUSED.items():
        found, out, err = shell(line)
        assert (found, out) == (code, ""), line
        assert said in err, (line, err)
    assert place_all_workers() == before
    assert not Path("new").exists()


def test_refusals_as_json(shell: Shell) -> None:
    code, out, _ = shell("issue --cluster gpu --json")
    assert (code, json.loads(out)["code"]) == (arguments.FAILED, "NB-428")


def test_each_command_has_its_help(shell: Shell) -> None:
    for command in ("init", "issue", "show", "renew", "revoke"):
        out = shell.good(f"{command} --help")
        assert f"whale-nebula certs {command}" in out and "--folder" in out
