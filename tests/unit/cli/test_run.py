"""`whale-nebula run`: the processes to start, refusals, and real processes from start to end.

The scripts use no TensorFlow: only the launcher is tested.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from whale_nebula.cli import arguments
from whale_nebula.cli.main import main
from whale_nebula.cli.run import SignalHandler, report_end
from whale_nebula.launch import Outcome, Result, spawn
from whale_nebula.launch.restarts import RunEnd

Capture = pytest.CaptureFixture[str]
SOON = 60.0
COMMAND = [sys.executable, "-m", "whale_nebula.cli.main", "run"]
BOTH = ["--all", "--clusters", "gpu,npu"]
START = """
import os, signal, sys, time
from whale_nebula.launch import attach
me = attach()
"""
INSECURE = "security: {insecure: true}\n"
PAIR = """
run: mt
clusters:
  gpu: {workers: ["10.77.0.1:7101"], gateway: "10.77.0.9:7100"}
  npu: {workers: ["10.77.0.2:7101"]}
seed: 3
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the platform's environment variables."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "JOBSET_")) or name == "TF_CONFIG"]:
        monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes a script with its identity in `me`; returns the path."""

    def write(code: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(START + code)
        return str(path)

    return write


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes a config; returns the path."""

    def write(text: str = PAIR) -> str:
        path = tmp_path / "clusters.yaml"
        path.write_text(text)
        return str(path)

    return write


class TestDryRun:
    def test_dry_run_of_one_cluster_lists_workers(self, script: Callable, config: Callable, capsys: Capture) -> None:
        path = script("")
        assert main(["run", "--config", config(), "--cluster", "gpu", "--dry-run", path, "--lr", "1"]) == arguments.DONE
        assert capsys.readouterr().out.splitlines() == [
            f"run 'mt' of {path} --lr 1, seed 3",
            "  gpu/0  starts here   10.77.0.1:7101, behind gateway 10.77.0.9:7100",
            "  npu/0  elsewhere     10.77.0.2:7101",
            "certificates of the config; addresses of the workers from config",
        ]

    def test_dry_run_prints_json(self, script: Callable, config: Callable, capsys: Capture) -> None:
        text = PAIR.replace('"10.77.0.2:7101"]', '"10.77.0.2:7101"], gateway: "10.77.0.8:7100"')
        main(["run", "--json", "--config", config(text), "--cluster", "npu", "--dry-run", script(""), "--json"])
        document = json.loads(capsys.readouterr().out)
        assert document["script"][1:] == ["--json"]
        assert (document["run"], document["answered"], document["insecure"], document["seed"]) == (
            "mt",
            "config",
            False,
            3,
        )
        assert [(each["worker"], each["here"], each["gateway"]) for each in document["workers"]] == [
            ("gpu/0", False, "10.77.0.9:7100"),
            ("npu/0", True, "10.77.0.8:7100"),
        ]

    def test_dry_run_of_all_uses_local_addresses(self, script: Callable, config: Callable, capsys: Capture) -> None:
        main(["run", "--all", "--config", config(), "--dry-run", "--json", script("")])
        workers = json.loads(capsys.readouterr().out)["workers"]
        assert all(each["here"] and each["gateway"] is None for each in workers)
        assert all(re.fullmatch(r"127\.0\.0\.1:[1-9]\d+", each["address"]) for each in workers)

    def test_explain_reports_source_of_addresses(self, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
        assert main(["run", "--explain"]) == arguments.DONE
        assert capsys.readouterr().out.splitlines()[-1] == "Slurm: yes, it provides the addresses of the workers"
        assert main(["run", "--explain", "--json"]) == arguments.DONE
        document = json.loads(capsys.readouterr().out)
        assert (document["answered"], list(document["declined"])) == ("Slurm", ["config", "TF_CONFIG"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "why"),
        [
            ([], "missing script"),
            (["--all", "--cluster", "gpu", "t.py"], "cannot be combined with --cluster or --worker"),
            (["--clusters", "gpu,npu", "t.py"], "--clusters needs --all"),
            (["--all", "--clusters", "gpu", "--config", "c", "t.py"], "replaces --config"),
            (["--worker", "one", "t.py"], "--worker needs a number"),
            (["--insecure", "t.py"], "unknown option '--insecure'"),
            (["--confg", "c.yaml", "t.py"], "did you mean '--config'?"),
        ],
    )
    def test_invalid_run_command_is_refused(self, words: list[str], why: str, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["run", *words])
        assert ended.value.code == arguments.USAGE
        assert why in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "text", "message"),
        [
            ("--cluster npu --dry-run", PAIR, "cluster 'npu' has no gateway, but 'gpu' has one"),
            ("--cluster gpu --dry-run", PAIR.replace("run: mt", "run: lo op"), "'lo op' is not a valid run name"),
            ("--all --dry-run", PAIR.replace("npu", "n/pu"), "'n/pu' is not a valid cluster name"),
            ("--cluster gpu", PAIR, "NB-428"),  # its certificates are not there
            ("--cluster gpu", PAIR.replace("10.77.0.1", "192.0.2.1") + INSECURE, "is not an address of this host"),
            ("--all --clusters gpu,gpu,npu", None, "mend: --clusters gpu,npu"),
            ("--all --clusters gpu,n/pu", None, "mend: --clusters gpu,n-pu"),
            ("--all", None, "--all --clusters gpu,npu"),
            ("--all --standby", PAIR, "--standby, but no worker is started again"),
            ("--all --standby --restarts 1", PAIR + "approvals: ana\n", "--standby in a run with approvals"),
        ],
    )
    def test_run_with_invalid_config_is_refused(
        self, options: str, text: str | None, message: str, script: Callable, config: Callable, capsys: Capture
    ) -> None:
        words = [] if text is None else ["--config", config(text)]
        assert main(["run", *words, *options.split(), script("")]) == arguments.CONFIG
        assert message in capsys.readouterr().err

    def test_missing_script_and_invalid_config_are_reported(
        self, script: Callable, config: Callable, capsys: Capture
    ) -> None:
        assert main(["run", "--all", "--clusters", "gpu,npu", "nowhere.py"]) == arguments.NO_FILE
        assert "nowhere.py" in capsys.readouterr().err
        assert main(["run", "--json", "--config", config("clutsers: {}"), script("")]) == arguments.CONFIG
        assert json.loads(capsys.readouterr().out)["mend"] == "did you mean 'clusters'?"

    def test_occupied_port_is_refused(self, script: Callable, config: Callable, capsys: Capture) -> None:
        with socket.create_server(("127.0.0.1", 0)) as busy:
            path = config(f'clusters: {{gpu: {{workers: ["127.0.0.1:{busy.getsockname()[1]}"]}}}}')
            assert main(["run", "--all", "--config", path, script("")]) == arguments.CONFIG
        assert "worker gpu/0 cannot listen" in capsys.readouterr().err


class TestRunning:
    def test_output_is_relayed_byte_for_byte(self, script: Callable, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        code = """
if me.cluster == "gpu":
    os.write(1, b"\\xff\\x00 raw\\r\\n")
    print(*sys.argv[1:])
    sys.stdout.write("no end")
else:
    print("an error", file=sys.stderr)
"""
        assert main(["run", *BOTH, script(code), "--all", "-x"]) == arguments.DONE
        out, err = capfdbinary.readouterr()
        assert out == b"\xff\x00 raw\r\n--all -x\nno end"
        assert err == b"an error\n"

    def test_lines_on_a_terminal_are_prefixed_with_worker(self, script: Callable) -> None:
        with TerminalCommand([*COMMAND, *BOTH, script("print(me.cluster)")]) as read:
            output = read()
        assert sorted(output.split("\r\n")) == ["", "[gpu/0] gpu", "[npu/0] npu"]

    def test_first_failed_worker_is_reported_with_exit_code(self, script: Callable, capfd: Capture) -> None:
        code = "if me.cluster == 'npu': sys.exit(7)\nwhile True: time.sleep(0.01)"
        path = script(code.replace("while True", "limit = time.time() + 1\nwhile time.time() < limit"))
        assert main(["run", "--json", *BOTH, path]) == 7
        ended = json.loads(capfd.readouterr().out)
        assert (ended["code"], ended["worker"], ended["why"]) == (7, "npu/0", "failed first: exit code 7")
        assert ended["codes"] == {"gpu/0": 0, "npu/0": 7}

    def test_same_error_of_workers_is_reported_once_at_the_end(self, script: Callable, capfd: Capture) -> None:
        """Both workers fail with the same error, whose text is printed once."""
        code = """
import whale_nebula as nb
def refuse():
    raise nb.errors.StateError("not now", where="train.py:3", why="too early", mend="do it later")
refuse()
"""
        assert main(["run", *BOTH, script(code)]) == arguments.FAILED
        err = capfd.readouterr().err
        assert [err.count(part) for part in ("why: too early", "mend: do it later", "NB-305")] == [1, 1, 1]
        lines = err.splitlines()
        first = re.fullmatch(r"whale-nebula: worker (.pu/0) failed first: .*: NB-305 not now \(train.py:3\)", lines[-3])
        assert first is not None and lines[-2:] == ["  why: too early", "  mend: do it later"]
        other = {"gpu/0": "npu/0", "npu/0": "gpu/0"}[first[1]]
        assert lines[-4] == f"whale-nebula: worker {other} failed, too: exit code 1, for the same reason"

    def test_traceback_names_worker_and_begins_with_script(self, script: Callable, capfd: Capture) -> None:
        path = script("if me.cluster == 'npu': raise ValueError('no such thing')")
        assert main(["run", *BOTH, path]) == arguments.FAILED
        lines = capfd.readouterr().err.splitlines()
        assert lines[0] == "whale-nebula: worker npu/0 failed with an error"
        assert lines[1] == "Traceback (most recent call last):"
        assert lines[2].startswith(f'  File "{path}", line ')

    def test_excepthook_of_the_script_is_kept(self, script: Callable, capfd: Capture) -> None:
        code = "sys.excepthook = lambda *told: print('hooked', file=sys.stderr)\nraise ValueError('no')"
        assert main(["run", "--all", "--clusters", "gpu", script(code)]) == arguments.FAILED
        assert capfd.readouterr().err.splitlines()[0] == "hooked"

    def test_ephemeral_certificates_are_private_and_deleted_after_the_run(
        self, script: Callable, capfd: Capture
    ) -> None:
        code = "folder = os.path.dirname(me.security.key)\nprint(me.has_one_launcher, folder, os.stat(folder).st_mode)"
        assert main(["run", "--all", "--clusters", "gpu", script(code)]) == arguments.DONE
        has_one_launcher, folder, mode = capfd.readouterr().out.split()
        assert has_one_launcher == "True"
        assert stat.S_IMODE(int(mode)) == 0o700
        assert not Path(folder).exists()

    def test_insecure_config_gives_a_warning(self, script: Callable, config: Callable, capfd: Capture) -> None:
        path = config("clusters: {gpu: {}}\nsecurity: {insecure: true}")
        assert main(["run", "--config", path, script("print(me.security)")]) == arguments.DONE
        out, err = capfd.readouterr()
        assert out == "None\n"
        assert f"insecure: true in {path}: connections are neither encrypted nor authenticated" in err

    def test_script_imports_modules_from_its_folder(self, script: Callable, tmp_path: Path, capfd: Capture) -> None:
        (tmp_path / "beside_it.py").write_text("HERE = 'beside it'")
        assert main(["run", script("import beside_it; print(beside_it.HERE)")]) == arguments.DONE
        assert capfd.readouterr().out == "beside it\n"


def format_library_error(code: str, message: str) -> str:
    return f"Traceback ...\nwhale_nebula.errors.SomeError: {code} {message}"


FIRST, TOO = "whale-nebula: worker gpu/0 failed first: ", "whale-nebula: worker npu/0 failed, too: exit code 1"
NOT_NOW = format_library_error("NB-305", "not now (train.py:3)\n  why: too early\n  mend: do it later\n")
HEARD = format_library_error("NB-302", "worker 'gpu/0' failed: not now\n  mend: do it later\n")
WHOLE = [f"{FIRST}exit code 1: NB-305 not now (train.py:3)", "  why: too early", "  mend: do it later"]
ENDS: dict[str, tuple[dict[str, tuple[int, str]], str, list[str]]] = {
    "last line of the error output": (
        {"gpu/0": (1, "Traceback ...\nValueError: no such thing\n")},
        "gpu/0",
        [f"{FIRST}exit code 1: ValueError: no such thing"],
    ),
    "killed": ({"gpu/0": (-9, "")}, "gpu/0", [f"{FIRST}ended by SIGKILL"]),
    "all failed workers, library error last": (
        {"gpu/0": (1, NOT_NOW), "npu/0": (1, "ended with it\n")},
        "gpu/0",
        [
            f"{TOO}: ended with it",
            f"{FIRST}exit code 1: NB-305 not now (train.py:3)",
            "  why: too early",
            "  mend: do it later",
        ],
    ),
    "worker that received the failure is not first": (
        {"gpu/0": (1, NOT_NOW), "npu/0": (1, HEARD)},
        "npu/0",
        [f"{TOO}, for the same reason", *WHOLE],
    ),
    "different errors are both complete": (
        {
            "gpu/0": (1, format_library_error("NB-305", "gpu/0 cannot\n  mend: a\n")),
            "npu/0": (1, format_library_error("NB-305", "npu/0 cannot\n  mend: b\n")),
        },
        "gpu/0",
        [f"{TOO}: NB-305 npu/0 cannot", "  mend: b", f"{FIRST}exit code 1: NB-305 gpu/0 cannot", "  mend: a"],
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_end_of_run_is_reported(case: str, capsys: Capture) -> None:
    outcomes, first, lines = ENDS[case]
    result = Result({name: Outcome(name, code, "", err) for name, (code, err) in outcomes.items()}, first, late=False)
    assert report_end(RunEnd(result), SignalHandler(1.0), as_json=False) == arguments.shell_code(outcomes["gpu/0"][0])
    assert capsys.readouterr().err.splitlines() == lines


def test_signal_while_workers_are_started_again_ends_them() -> None:
    handler = SignalHandler(SOON, ended_at=time.time())
    handler.handle(signal.SIGTERM, None)
    with spawn(["-c", "import time; time.sleep(300)"], {"gpu/0": "gpu"}) as job:
        handler.begin(job)
        assert job.wait(SOON).codes == {"gpu/0": -signal.SIGTERM}


class TestSignals:
    STEPS = """
from whale_nebula.launch.worker_exit import exit_agreement
for step in range(10**6):
    exit_agreement.begin_step()
    if step == 3: print("stepping", flush=True)
    time.sleep(0.01)
    exit_agreement.conclude_step({me.worker: exit_agreement.exit_reason})
"""
    DEAF = "for each in (signal.SIGTERM, signal.SIGINT): signal.signal(each, signal.SIG_IGN)\n"

    @pytest.mark.parametrize(
        "number",
        [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.grid) for each in (signal.SIGINT, signal.SIGHUP))],
    )
    def test_first_signal_stops_workers_after_their_step(self, number: signal.Signals, script: Callable) -> None:
        if signal.getsignal(number) == signal.SIG_IGN:
            pytest.skip(f"{number.name} is ignored here, as under nohup, and so it is by what is started from here")
        with RunningCommand([*BOTH, script(self.STEPS)], lines=2) as process:
            process.send_signal(number)
            _, err = process.communicate(timeout=SOON)
        assert process.returncode == arguments.LEFT
        assert f"whale-nebula: {number.name}: the workers exit after their next step" in err
        assert f"whale-nebula: worker npu/0 leaves: npu/0 was asked to stop: {number.name}" in err
        assert err.splitlines()[-1] == "whale-nebula: the workers exited on request; the run can be started again"

    def test_worker_without_steps_exits_on_signal(self, script: Callable) -> None:
        with RunningCommand([*BOTH, script("print(1, flush=True); time.sleep(300)")], lines=2) as process:
            process.terminate()
            assert process.wait(SOON) == arguments.LEFT

    def test_notice_in_a_file_asks_workers_to_leave_and_metrics_are_served(
        self, script: Callable, tmp_path: Path
    ) -> None:
        notice = tmp_path / "notice"
        words = [*BOTH, "--metrics", "127.0.0.1:0", "--notices", str(notice)]
        with RunningCommand([*words, script("print(1, flush=True); time.sleep(300)")], lines=2) as process:
            assert process.stderr is not None
            address = process.stderr.readline().rpartition("metrics are at ")[2].strip()
            with urllib.request.urlopen(address, timeout=SOON) as answer:
                assert answer.status == 200
            notice.write_text("npu=")
            assert f"the notice in {notice} is ignored: NB-104 " in process.stderr.readline()
            notice.write_text("preempt")
            assert process.wait(SOON) == arguments.LEFT

    def test_second_signal_kills_workers(self, script: Callable) -> None:
        with RunningCommand([*BOTH, script(self.DEAF + "print(1, flush=True); time.sleep(300)")], lines=2) as process:
            workers = psutil.Process(process.pid).children()
            process.terminate()
            assert process.stderr is not None and "repeat it to kill them" in process.stderr.readline()
            process.terminate()
            assert process.wait(SOON) == 143
        assert len(workers) == 2 and not any(worker.is_running() for worker in workers)

    def test_worker_is_killed_after_patience(self, script: Callable, config: Callable) -> None:
        path = config("clusters: {gpu: {}}\npatience: 200ms")
        words = ["--all", "--config", path, script(self.DEAF + "print(1, flush=True); time.sleep(300)")]
        with RunningCommand(words, lines=1) as process:
            process.terminate()
            _, err = process.communicate(timeout=SOON)
        assert process.returncode == 137
        assert "killed, because they did not exit in time: gpu/0" in err

    def test_killed_launcher_leaves_no_processes(self, script: Callable) -> None:
        code = "import subprocess\nsubprocess.Popen(['sleep', '300'])\nprint(1, flush=True)\ntime.sleep(300)"
        with RunningCommand([*BOTH, script(code)], lines=2) as process:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait(SOON)
            ended, alive = psutil.wait_procs(children, timeout=SOON)
        assert len(ended) == 4 and not alive


class RunningCommand:
    """The command in a separate process, after its workers have written some lines; it is killed at the end."""

    def __init__(self, words: list[str], lines: int) -> None:
        self._words, self._lines = words, lines

    def __enter__(self) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen([*COMMAND, *self._words], text=True, **pipes)  # type: ignore[call-overload]
        for _ in range(self._lines):
            assert self._process.stdout.readline(), self._process.stderr.read()
        return self._process

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=SOON)


class TerminalCommand:
    """A command whose output is a terminal; yields a function that reads all of it."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def __enter__(self) -> Callable[[], str]:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(self._command, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        return lambda: b"".join(self._pieces()).decode()

    def _pieces(self) -> Iterator[bytes]:
        limit = time.monotonic() + SOON
        while select.select([self._ours], [], [], max(0.0, limit - time.monotonic()))[0]:
            try:
                yield os.read(self._ours, 65536)
            except OSError:
                return

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait(SOON)
        os.close(self._ours)
