"""Workers of tests as forks of a process that has TensorFlow loaded: a worker starts in a tenth of a second.

They are processes of their own like all others, with their own pipes, group, environment and seeds; they only do not
load TensorFlow, Keras and the library again, which takes five seconds of a processor. A `whale-nebula run` that is
started here has its workers forked likewise. `make soak` starts workers as users do. `run` is for programs of other
tests that need a process in which TensorFlow has not computed yet.

A fork is a child of the process that requested it: the kernel hands it over (PR_SET_CHILD_SUBREAPER) when
the process in between has ended.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULE = "tests.processes.zygote"
PR_SET_CHILD_SUBREAPER = 36
_MAX_BYTES, _MAX_FILES, _FIRST_MOVED = 1 << 18, 32, 200
_START_SECONDS = 120.0
LAUNCHERS = ("whale_nebula", "whale_nebula.cli.main")
_HANDOVER_SECONDS = 10.0
_LOCK = threading.Lock()


class Forked(subprocess.Popen[bytes]):
    """A child that another process has forked on request."""

    def __init__(self, pid: int, args: Sequence[str], out: int, err: int) -> None:
        super().__init__(["true"], stdin=subprocess.DEVNULL)  # initialises the attributes of Popen
        super().wait()
        self.pid, self.args, self.returncode = pid, list(args), None
        self.stdout, self.stderr = os.fdopen(out, "rb"), os.fdopen(err, "rb")


@cache
def _zygote() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", MODULE, str(theirs.fileno())]
        process = subprocess.Popen(
            command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    ours.settimeout(_START_SECONDS)
    ours.recv(1)
    return process, ours


_OWN_SOCKETS: list[socket.socket] = []
"""In a forked launcher: the socket of its own fork that forks workers."""


def _find_socket() -> socket.socket:
    """The socket of the process that forks for this one."""
    return _OWN_SOCKETS[0] if _OWN_SOCKETS else _zygote()[1]


def stop() -> None:
    """End the process that forks, if there is one."""
    if _zygote.cache_info().currsize:
        process, line = _zygote()
        line.close()
        process.wait(_START_SECONDS)
        _zygote.cache_clear()


def start(
    argv: Sequence[str],
    identity: Any = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.Popen[bytes]:
    """Fork a process that runs these arguments of Python, like `whale_nebula.launch.worker_processes.start`."""
    from whale_nebula.launch.attach import VARIABLE

    with _LOCK:
        line = _find_socket()
    full_env = {**os.environ, **(env or {}), **({VARIABLE: identity.to_json()} if identity else {})}
    descriptors = list(identity.descriptors) if identity else []
    (out, out_write), (err, err_write) = os.pipe(), os.pipe()
    request = {"argv": list(argv), "env": full_env, "cwd": os.fspath(cwd or os.getcwd()), "parent": os.getpid()}
    request["descriptors"] = [1, 2, *descriptors]
    with _LOCK:
        _set_subreaper(True)
        try:
            socket.send_fds(line, [json.dumps(request).encode()], [out_write, err_write, *descriptors])
            pid = int(line.recv(64))
        finally:
            _set_subreaper(False)
    os.close(out_write)
    os.close(err_write)
    return Forked(pid, argv, out, err)


def run(
    *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a fork, and wait: "-c" and code, "-m" and a module, or a script and its
    arguments.
    """
    if sys.platform != "linux":
        merged = {**os.environ, **(env or {})}
        return subprocess.run(
            [sys.executable, *argv], cwd=cwd, env=merged, capture_output=True, text=True, timeout=timeout
        )
    if not argv[0].startswith("-"):
        places = f"sys.path[0], sys.argv[0] = {str(Path(cwd or '', argv[0]).parent)!r}, {argv[0]!r}"
        argv = ("-c", f"import runpy, sys; {places}; runpy.run_path({argv[0]!r}, run_name='__main__')", *argv[1:])
    with start(argv, cwd=cwd, env=env) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(argv, process.returncode, out.decode(), err.decode())


def _set_subreaper(enabled: bool) -> None:
    """Make this process the reaper of orphaned descendants, or not."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0):
        raise OSError("this system has no subreapers")


# ---------------------------------------------------------------------- the process that forks
def serve(line: socket.socket) -> None:
    """Fork on requests until the socket is closed."""
    line.send(b"!")
    while True:
        data, files, _, _ = socket.recv_fds(line, _MAX_BYTES, _MAX_FILES)
        if not data:
            return
        read_end, write_end = os.pipe()
        intermediate = os.fork()
        if not intermediate:
            _fork_worker(line, write_end, json.loads(data), files)
        os.close(write_end)
        worker = os.read(read_end, 64)
        os.close(read_end)
        os.waitpid(intermediate, 0)
        line.send(worker)  # only now: it has been handed over
        for each in files:
            os.close(each)


def _fork_worker(line: socket.socket, write_end: int, request: dict[str, Any], files: list[int]) -> None:
    """Fork the worker from the intermediate process, which then exits, so that the worker is reparented."""
    worker = os.fork()
    if worker:
        os.write(write_end, str(worker).encode())
        os._exit(0)
    os.close(write_end)
    line.close()
    code = 1
    try:
        code = _run_program(request, files)
    finally:
        os._exit(code)


def _run_program(request: dict[str, Any], files: list[int]) -> int:
    """Run the program in the worker, as the interpreter does."""
    import atexit
    import random
    import runpy

    import numpy as np
    import tensorflow

    os.setpgid(0, 0)
    moved = [_move_descriptor(each) for each in files]
    for each, number in zip(moved, request["descriptors"], strict=True):
        os.dup2(each, number, inheritable=True)
        os.close(each)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    limit = time.monotonic() + _HANDOVER_SECONDS
    while os.getppid() != request["parent"]:
        if time.monotonic() > limit:
            return 1
        time.sleep(0.001)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if os.environ.get("TESTS_WITHOUT_OPTIMIZER"):  # as the test's own process
        tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    random.seed()
    np.random.seed()
    kind, name, *rest = request["argv"]
    sys.path[0] = request["cwd"]
    sys.path[1:1] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", *sys.path)]
    if kind == "-m" and name in LAUNCHERS and rest[:1] == ["run"]:
        _fork_workers_from_here()
    code = 0
    try:
        if kind == "-m":
            sys.argv = [name, *rest]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *rest]
            exec(compile(name, "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _fork_workers_from_here() -> None:
    """Fork the workers of this process from a copy of it that has computed nothing."""
    from whale_nebula.launch import worker_processes

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # readers of the launcher's output must not wait for this process
        os.dup2(1, 2)
        try:
            serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    ours.recv(1)
    _OWN_SOCKETS.append(ours)
    worker_processes.start = start


def _move_descriptor(descriptor: int) -> int:
    """Duplicate a descriptor to a number that no request uses."""
    import fcntl

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_MOVED)
    os.close(descriptor)
    return moved


def main() -> None:
    """Load the modules that workers need, and serve requests."""
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    import whale_nebula.runtime.function
    import whale_nebula.runtime.keras
    import whale_nebula.runtime.keras_hook
    import whale_nebula.runtime.session.rendezvous
    import whale_nebula.runtime.step.distributed
    import whale_nebula.transport.grpc.links  # noqa: F401

    gc.collect()
    gc.freeze()  # loaded objects are never garbage: collecting them would cost time and copy memory
    with socket.socket(fileno=int(sys.argv[1])) as line:
        serve(line)


if __name__ == "__main__":
    main()
