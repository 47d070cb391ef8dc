"""Certificates that `run` and `gateway` renew by a token while they run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.accounts.conftest import GOOD, Site, identify
from tests.unit.gateway.test_process import kill_at_exit, read_listening_line
from tests.unit.transport.grpc_workers import find_free_address
from whale_nebula.accounts.members import DISABLED, OWNER
from whale_nebula.accounts.registry import TOKEN
from whale_nebula.cli import login as login_command
from whale_nebula.cli.login import renew_certificates
from whale_nebula.cli.main import main
from whale_nebula.errors import ConfigError, LoginError
from whale_nebula.security import Files, files


@pytest.fixture
def config(site: Site, tmp_path: Path) -> Path:
    """A host's config, whose gateway is the login service, with the owner's ca.pem and a token."""
    certs = tmp_path / "site" / "certs"
    certs.mkdir(0o700, parents=True)
    (certs / "ca.pem").write_bytes(site.ca)
    path = certs.parent / "clusters.yaml"
    path.write_text(
        f'run: mt\nclusters: {{gpu: {{workers: ["{find_free_address()}"], gateway: "127.0.0.1:{site.port}"}},\n'
        'npu: {workers: ["10.77.0.2:7101"], gateway: "10.77.0.2:7100"}}\n'
    )
    token = certs.parent / "token"
    token.touch(0o600)
    token.write_text(site.issuer.registry.make_secret("ana", TOKEN, 1))
    return path


def wait_until_changed(path: Path, before: bytes) -> bytes:
    deadline = time.monotonic() + 60
    while (found := path.read_bytes()) == before and time.monotonic() < deadline:
        time.monotonic()
    return found


def test_certificates_are_renewed_before_they_expire(
    config: Path, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(login_command, "HOURS", 2 / 3600)
    monkeypatch.setattr(login_command, "POLL_SECONDS", 0.05)
    cert = Files.in_folder(config.parent / "certs", identify(0)).cert
    with renew_certificates(str(config), [identify(0)], "ana", str(config.parent / "token")):
        first = cert.read_bytes()
        second = wait_until_changed(cert, first)
        assert first != second
        assert files.parse_certificate(first, "").public_key() == files.parse_certificate(second, "").public_key()
    monkeypatch.undo()
    monkeypatch.setattr(login_command, "POLL_SECONDS", 0.05)
    site.issuer.registry.set_state("ana", DISABLED)
    renewal = renew_certificates(str(config), [identify(1)], "ana", str(config.parent / "token"))
    with pytest.raises(LoginError), renewal:
        pass
    assert "logged in as ana (trainer): gpu/0" in capsys.readouterr().err


def test_renewal_needs_the_files_that_a_login_writes(config: Path) -> None:
    with config.open("a") as file:
        file.write('security: {cert: "elsewhere/{cluster}.pem"}\n')
    renewal = renew_certificates(str(config), [identify(0)], "ana", str(config.parent / "token"))
    with pytest.raises(ConfigError, match="a login writes other files than the config names"), renewal:
        pass


def test_run_logs_in_with_a_token(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = config.parent / "train.py"
    script.write_text("print('trained')\n")
    options = [
        "--config",
        str(config),
        "--cluster",
        "gpu",
        "--account",
        "ana",
        "--token-file",
        str(config.parent / "token"),
    ]
    assert main(["run", *options, str(script)]) == 0
    out, err = capfd.readouterr()
    assert "trained" in out and "logged in as ana (trainer): gpu/0" in err and "account ana of gpu: folder" in err
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--all", *options[:2], *options[-2:], str(script)])


def test_gateway_logs_in_with_a_token(config: Path, site: Site) -> None:
    site.issuer.registry.add("olga", role=OWNER, password=GOOD)
    token = config.parent / "token"
    token.write_text(site.issuer.registry.make_secret("olga", TOKEN, 1))
    options = ["--config", str(config), "--cluster", "gpu", "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "whale_nebula.cli.main", "gateway", *options]
    process = subprocess.Popen(
        [*command, "--account", "olga", "--token-file", str(token)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with kill_at_exit(process):
        assert "gateway of cluster gpu, run mt, listens on 127.0.0.1:" in read_listening_line(process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "logged in as olga (owner): gpu/gateway" in err.decode()
