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
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from whale_nebula.cli import arguments
from whale_nebula.cli.main import main
from whale_nebula.cli.run import SignalHandler, report_end
from whale_nebula.launch import Outcome, Result
from whale_nebula.launch.restarts import Ended

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
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the platform that runs the tests is seen."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "JOBSET_")) or name == "TF_CONFIG"]:
        monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script that knows who it is; gives its path."""

    def write(code: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(START + code)
        return str(path)

    return write


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    """Write a config; gives its path."""

    def write(text: str = PAIR) -> str:
        path = tmp_path / "clusters.yaml"
        path.write_text(text)
        return str(path)

    return write


class TestWhatWouldBeStarted:
    def test_one_of_two_clusters(self, script: Callable, config: Callable, capsys: Capture) -> None:
        path = script("")
        assert main(["run", "--config", config(), "--cluster", "gpu", "--dry-run", path, "--lr", "1"]) == arguments.DONE
        assert capsys.readouterr().out.splitlines() == [
            f"run 'mt' of {path} --lr 1, seed 3",
            "  gpu/0  starts here   10.77.0.1:7101, behind gateway 10.77.0.9:7100",
            "  npu/0  elsewhere     10.77.0.2:7101",
            "certificates of the config; addresses of the workers from config",
        ]

    def test_as_json(self, script: Callable, config: Callable, capsys: Capture) -> None:
        text = PAIR.replace('"10.77.0.2:7101"]', '"10.77.0.2:7101"], gateway: "10.77.0.8:7100"')
        main(["run", "--json", "--config", config(text), "--cluster", "npu", "--dry-run", script(""), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["script"][1:] == ["--json"]
        assert (found["run"], found["answered"], found["insecure"], found["seed"]) == ("mt", "config", False, 3)
        assert [(each["worker"], each["here"], each["gateway"]) for each in found["workers"]] == [
            ("gpu/0", False, "10.77.0.9:7100"),
            ("npu/0", True, "10.77.0.8:7100"),
        ]

    def test_all_on_this_machine(self, script: Callable, config: Callable, capsys: Capture) -> None:
        main(["run", "--all", "--config", config(), "--dry-run", "--json", script("")])
        workers = json.loads(capsys.readouterr().out)["workers"]
        assert all(each["here"] and each["gateway"] is None for each in workers)
        assert all(re.fullmatch(r"127\.0\.0\.1:[1-9]\d+", each["address"]) for each in workers)

    def test_who_says_where_workers_are(self, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
        assert main(["run", "--explain"]) == arguments.DONE
        assert capsys.readouterr().out.splitlines()[-1] == "Slurm: yes, it provides the addresses of the workers"
        assert main(["run", "--explain", "--json"]) == arguments.DONE
        found = json.loads(capsys.readouterr().out)
        assert (found["answered"], list(found["declined"])) == ("Slurm", ["config", "TF_CONFIG"])


class TestWhatIsRefused:
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
    def test_command_lines(self, words: list[str], why: str, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["run", *words])
        assert ended.value.code == arguments.USAGE
        assert why in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "text", "said"),
        [
            ("--cluster npu --dry-run", PAIR, "cluster 'npu' has no gateway, but 'gpu' has one"),
            ("--cluster gpu --dry-run", PAIR.replace("run: mt", "run: lo op"), "'lo op' is not a valid run name"),
            ("--all --dry-run", PAIR.replace("npu", "n/pu"), "'n/pu' is not a valid cluster name"),
            ("--cluster gpu", PAIR, "NB-428"),  # its certificates are not there
            ("--cluster gpu", PAIR.replace("10.77.0.1", "192.0.2.1") + INSECURE, "is not an address of this host"),
            ("--all --clusters gpu,gpu,npu", None, "mend: --clusters gpu,npu"),
            ("--all --clusters gpu,n/pu", None, "mend: --clusters gpu,n-pu"),
            ("--all", None, "--all --clusters gpu,npu"),
        ],
    )
    def test_what_could_never_run(
        self, options: str, text: str | None, said: str, script: Callable, config: Callable, capsys: Capture
    ) -> None:
        words = [] if text is None else ["--config", config(text)]
        assert main(["run", *words, *options.split(), script("")]) == arguments.CONFIG
        assert said in capsys.readouterr().err

    def test_no_script_and_a_broken_config_as_json(self, script: Callable, config: Callable, capsys: Capture) -> None:
        assert main(["run", "--all", "--clusters", "gpu,npu", "nowhere.py"]) == arguments.NO_FILE
        assert "nowhere.py" in capsys.readouterr().err
        assert main(["run", "--json", "--config", config("clutsers: {}"), script("")]) == arguments.CONFIG
        assert json.loads(capsys.readouterr().out)["mend"] == "did you mean 'clusters'?"

    def test_a_port_that_is_taken(self, script: Callable, config: Callable, capsys: Capture) -> None:
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

    def test_on_a_terminal_lines_bear_their_worker(self, script: Callable) -> None:
        with on_terminal([*COMMAND, *BOTH, script("print(me.cluster)")]) as read:
            told = read()
        assert sorted(told.split("\r\n")) == ["", "[gpu/0] gpu", "[npu/0] npu"]

    def test_the_worker_that_fails_first_is_told_with_its_code(self, script: Callable, capfd: Capture) -> None:
        code = "if me.cluster == 'npu': sys.exit(7)\nwhile True: time.sleep(0.01)"
        path = script(code.replace("while True", "limit = time.time() + 1\nwhile time.time() < limit"))
        assert main(["run", "--json", *BOTH, path]) == 7
        ended = json.loads(capfd.readouterr().out)
        assert (ended["code"], ended["worker"], ended["why"]) == (7, "npu/0", "failed first: exit code 7")
        assert ended["codes"] == {"gpu/0": 0, "npu/0": 7}

    def test_our_error_is_said_once_and_below_all_tracebacks(self, script: Callable, capfd: Capture) -> None:
        """Both workers find the same: its sentence, too, is there once."""
        code = """
import whale_nebula as nb
def refuse():
    raise nb.errors.StateError("not now", where="train.py:3", why="too early", mend="do it later")
refuse()
"""
        assert main(["run", *BOTH, script(code)]) == arguments.FAILED
        told = capfd.readouterr().err
        assert [told.count(part) for part in ("why: too early", "mend: do it later", "NB-305")] == [1, 1, 1]
        lines = told.splitlines()
        first = re.fullmatch(r"whale-nebula: worker (.pu/0) failed first: .*: NB-305 not now \(train.py:3\)", lines[-3])
        assert first is not None and lines[-2:] == ["  why: too early", "  mend: do it later"]
        other = {"gpu/0": "npu/0", "npu/0": "gpu/0"}[first[1]]
        assert lines[-4] == f"whale-nebula: worker {other} failed, too: exit code 1, for the same reason"

    def test_a_traceback_bears_its_worker_and_begins_with_the_script(self, script: Callable, capfd: Capture) -> None:
        path = script("if me.cluster == 'npu': raise ValueError('no such thing')")
        assert main(["run", *BOTH, path]) == arguments.FAILED
        lines = capfd.readouterr().err.splitlines()
        assert lines[0] == "whale-nebula: worker npu/0 failed with an error"
        assert lines[1] == "Traceback (most recent call last):"
        assert lines[2].startswith(f'  File "{path}", line ')

    def test_a_script_with_a_hook_of_its_own_for_errors_keeps_it(self, script: Callable, capfd: Capture) -> None:
        code = "sys.excepthook = lambda *told: print('hooked', file=sys.stderr)\nraise ValueError('no')"
        assert main(["run", "--all", "--clusters", "gpu", script(code)]) == arguments.FAILED
        assert capfd.readouterr().err.splitlines()[0] == "hooked"

    def test_workers_know_whether_all_are_here_and_certificates_live_as_long_as_the_run(
        self, script: Callable, capfd: Capture
    ) -> None:
        code = "folder = os.path.dirname(me.security.key)\nprint(me.everywhere, folder, oct(os.stat(folder).st_mode))"
        assert main(["run", "--all", "--clusters", "gpu", script(code)]) == arguments.DONE
        everywhere, folder, mode = capfd.readouterr().out.split()
        assert everywhere == "True"
        assert stat.S_IMODE(int(mode, 8)) == 0o700
        assert not Path(folder).exists()

    def test_insecure_is_said_at_every_start(self, script: Callable, config: Callable, capfd: Capture) -> None:
        path = config("clusters: {gpu: {}}\nsecurity: {insecure: true}")
        assert main(["run", "--config", path, script("print(me.security)")]) == arguments.DONE
        out, err = capfd.readouterr()
        assert out == "None\n"
        assert f"insecure: true in {path}: connections are neither encrypted nor authenticated" in err

    def test_a_script_finds_the_modules_beside_it(self, script: Callable, tmp_path: Path, capfd: Capture) -> None:
        (tmp_path / "beside_it.py").write_text("HERE = 'beside it'")
        assert main(["run", script("import beside_it; print(beside_it.HERE)")]) == arguments.DONE
        assert capfd.readouterr().out == "beside it\n"


def ours(code: str, said: str) -> str:
    return f"Traceback ...\nwhale_nebula.errors.SomeError: {code} {said}"


FIRST, TOO = "whale-nebula: worker gpu/0 failed first: ", "whale-nebula: worker npu/0 failed, too: exit code 1"
NOT_NOW = ours("NB-305", "not now (train.py:3)\n  why: too early\n  mend: do it later\n")
HEARD = ours("NB-302", "worker 'gpu/0' failed: not now\n  mend: do it later\n")
WHOLE = [f"{FIRST}exit code 1: NB-305 not now (train.py:3)", "  why: too early", "  mend: do it later"]
ENDS: dict[str, tuple[dict[str, tuple[int, str]], str, list[str]]] = {
    "its last word": (
        {"gpu/0": (1, "Traceback ...\nValueError: no such thing\n")},
        "gpu/0",
        [f"{FIRST}exit code 1: ValueError: no such thing"],
    ),
    "killed": ({"gpu/0": (-9, "")}, "gpu/0", [f"{FIRST}ended by SIGKILL"]),
    "all that failed, and our own error last": (
        {"gpu/0": (1, NOT_NOW), "npu/0": (1, "ended with it\n")},
        "gpu/0",
        [
            f"{TOO}: ended with it",
            f"{FIRST}exit code 1: NB-305 not now (train.py:3)",
            "  why: too early",
            "  mend: do it later",
        ],
    ),
    "who only heard of it is not the first": (
        {"gpu/0": (1, NOT_NOW), "npu/0": (1, HEARD)},
        "npu/0",
        [f"{TOO}, for the same reason", *WHOLE],
    ),
    "another error as a whole": (
        {
            "gpu/0": (1, ours("NB-305", "gpu/0 cannot\n  mend: a\n")),
            "npu/0": (1, ours("NB-305", "npu/0 cannot\n  mend: b\n")),
        },
        "gpu/0",
        [f"{TOO}: NB-305 npu/0 cannot", "  mend: b", f"{FIRST}exit code 1: NB-305 gpu/0 cannot", "  mend: a"],
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_how_a_run_ended_is_told(case: str, capsys: Capture) -> None:
    said, first, lines = ENDS[case]
    result = Result({name: Outcome(name, code, "", err) for name, (code, err) in said.items()}, first, late=False)
    assert report_end(Ended(result), SignalHandler(1.0), as_json=False) == arguments.shell_code(said["gpu/0"][0])
    assert capsys.readouterr().err.splitlines() == lines


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
    def test_the_first_lets_the_workers_leave(self, number: signal.Signals, script: Callable) -> None:
        if signal.getsignal(number) == signal.SIG_IGN:
            pytest.skip(f"{number.name} is ignored here, as under nohup, and so it is by what is started from here")
        with running([*BOTH, script(self.STEPS)], lines=2) as process:
            process.send_signal(number)
            _, err = process.communicate(timeout=SOON)
        assert process.returncode == arguments.LEFT
        assert f"whale-nebula: {number.name}: the workers exit after their next step" in err
        assert f"whale-nebula: worker npu/0 leaves: npu/0 was asked to stop: {number.name}" in err
        assert err.splitlines()[-1] == "whale-nebula: the workers exited on request; the run can be started again"

    def test_a_worker_without_steps_leaves_at_once(self, script: Callable) -> None:
        with running([*BOTH, script("print(1, flush=True); time.sleep(300)")], lines=2) as process:
            process.terminate()
            assert process.wait(SOON) == arguments.LEFT

    def test_the_second_ends_them_at_once(self, script: Callable) -> None:
        with running([*BOTH, script(self.DEAF + "print(1, flush=True); time.sleep(300)")], lines=2) as process:
            workers = psutil.Process(process.pid).children()
            process.terminate()
            assert process.stderr is not None and "repeat it to kill them" in process.stderr.readline()
            process.terminate()
            assert process.wait(SOON) == 143
        assert len(workers) == 2 and not any(worker.is_running() for worker in workers)

    def test_who_does_not_leave_in_time_is_killed(self, script: Callable, config: Callable) -> None:
        path = config("clusters: {gpu: {}}\npatience: 200ms")
        words = ["--all", "--config", path, script(self.DEAF + "print(1, flush=True); time.sleep(300)")]
        with running(words, lines=1) as process:
            process.terminate()
            _, err = process.communicate(timeout=SOON)
        assert process.returncode == 137
        assert "killed, because they did not exit in time: gpu/0" in err

    def test_a_command_that_is_killed_leaves_nobody(self, script: Callable) -> None:
        code = "import subprocess\nsubprocess.Popen(['sleep', '300'])\nprint(1, flush=True)\ntime.sleep(300)"
        with running([*BOTH, script(code)], lines=2) as process:
            there = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait(SOON)
            gone, alive = psutil.wait_procs(there, timeout=SOON)
        assert len(gone) == 4 and not alive


class running:
    """The command as a process of its own, once its workers have written so many lines; it is gone at the end."""

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


class on_terminal:
    """A command whose output and errors are a terminal; gives what reads all of it."""

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
