"""The tutorial of docs/data.md: its files are written, its commands run, and their output is as shown."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.processes import zygote
from tests.unit.gateway.test_process import kill_at_exit, read_listening_line
from whale_nebula.accounts.login import LoginIssuer
from whale_nebula.accounts.registry import Registry
from whale_nebula.accounts.service import serve as serve_accounts
from whale_nebula.cli.main import main
from whale_nebula.config import load
from whale_nebula.datasets.service import open_service
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.launch.gateways import start_gateway
from whale_nebula.security import authority

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text("utf-8")
FILE = re.compile(r"```(?:python|yaml)\n# ([\w./-]+)\n(.*?)```", re.DOTALL)
PASSWORD = "a sentence to remember"


class PageCommands:
    """Runs the commands of the page; ports and numbers that differ in each run are replaced."""

    def __init__(self, services: contextlib.ExitStack) -> None:
        self.services, self.replacements, self.invitation = services, {}, ""

    def localize(self, text: str) -> str:
        for shown_text, here in self.replacements.items():
            text = text.replace(shown_text, here)
        return text

    def run(self, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
        words = shlex.split(self.localize(line), comments=False)
        if words[-1] == "&":
            return self.serve(words)
        if words[0] == "umask":
            os.umask(int(words[1], 8))
            return ""
        if words[0] in ("mkdir", "cp"):
            subprocess.run(words, check=True)
            return ""
        if words[0] == "python" or words[1] == "approve":
            done = zygote.run(*(["-m", "whale_nebula.cli.main", *words[1:]] if words[1] == "approve" else words[1:]))
            assert "Traceback" not in done.stdout, done.stdout
            return done.stdout if done.returncode == 0 else done.stderr
        if "--invitation" in words:
            monkeypatch.setattr("sys.stdin", io.StringIO(f"{self.invitation}\n{PASSWORD}\n{PASSWORD}\n"))
        words, target = (words[:-2], words[-1]) if words[-2] == ">" else (words, "")
        capsys.readouterr()
        main(words[1:])
        said = "".join(capsys.readouterr())
        if target:
            Path(target).write_text(said)
            return ""
        if found := re.search(r"invitation: (\S+)", said):
            self.invitation = self.invitation or found[1]
        return said

    def serve(self, words: list[str]) -> str:
        """A service or a gateway of the page; a gateway is at another port."""
        if words[1] == "gateway":
            path, services = words[words.index("--config") + 1], Path(words[words.index("--services") + 1])
            config, cluster = load(path), words[words.index("--cluster") + 1]
            process = start_gateway(
                replace(GatewaySettings.from_config(config, cluster, path, "127.0.0.1:0"), services=services)
            )
            self.services.enter_context(kill_at_exit(process))
            at = read_listening_line(process).partition("listens on ")[2].partition(";")[0]
            self.replacements[str(config.gateway_of(cluster))] = at
            return ""
        folder, cluster = Path(words[words.index("--folder") + 1]), words[words.index("--folder") + 1].split("/")[0]
        signer = authority.load(folder)
        if words[1] == "data":
            approvals = Path(words[words.index("--approvals") + 1]) if "--approvals" in words else None
            self.services.enter_context(open_service(folder, signer, cluster, "127.0.0.1", 0, folder, approvals))
        else:
            registry = self.services.enter_context(contextlib.closing(Registry(folder, signer)))
            issuer = LoginIssuer(registry, signer, folder)
            self.services.enter_context(serve_accounts(issuer, cluster, "127.0.0.1", 0, folder))
        return ""


def mask_variable_text(text: str) -> list[str]:
    text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(Z| UTC)", "DATE", text.replace("2099-01-01T00:00:00Z", "END"))
    return [line.rstrip() for line in re.sub(r"\b[0-9a-f]{8}\b", "NUMBER", text).strip().splitlines()]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageCommands]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("getpass.getuser", lambda: "olga")
    for name, text in FILE.findall(PAGE):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"# {name}\n{text}")
    with contextlib.ExitStack() as services:
        services.callback(os.umask, os.umask(0o022))
        yield PageCommands(services)


@pytest.mark.grid
def test_commands_print_what_the_page_shows(
    commands: PageCommands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for each in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = each.partition("\n")
            for path in ("ana/clusters.yaml", "bob/clusters.yaml", "cleo/clusters.yaml"):
                Path(path).write_text(commands.localize(Path(path).read_text()))
            found = commands.run(line, capsys, monkeypatch)
            trained += [found] * line.startswith("python train.py")
            if shown:
                print(found)
                assert mask_variable_text(found) == mask_variable_text(shown), line
                shown_text, here = (re.findall(r"\b[0-9a-f]{8}\b", text) for text in (shown, found))
                commands.replacements.update(zip(shown_text, here, strict=True))
    assert "NB-214 train.py is not approved" in trained[0]
    report = found  # as the auditor was sent it
    assert "report  eva  allow" in report
    assert "ana  tickets  400 rows, 12800 bytes, in 8 batches" in report
    assert "train.py, approved by " in report and ", reviewed on Monday" in report
    assert report.count("NB-433 bob may not read dataset 'tickets'") == 3
    for part in ("it has not requested access", ", not for this purpose", "its grant was withdrawn"):
        assert part in report
    assert "disable  ana" in report and "withdraw  dataset tickets" in report
    assert re.search(r"data-gpu.jsonl: \d+ records, signed up to record \d+", report)
    assert "data-gpu.jsonl" in report and "data-gpu-worker-0.jsonl" in report
