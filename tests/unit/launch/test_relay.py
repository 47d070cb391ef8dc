"""Workers' output is relayed byte for byte, in whole lines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from whale_nebula.launch.worker_exit import find_last_error_line
from whale_nebula.launch.worker_output import Relay, Sink


def relay_output(code: str, tmp_path: Path, prefixes: dict[str, str] | None = None) -> tuple[bytes, bytes, str]:
    """Output, errors and the end of the errors of some Python code."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        relay = Relay("gpu/0", process, {"out": Sink(out.fileno()), "err": Sink(err.fileno())}, prefixes or {})
        process.wait(60)
        _, tail = relay.close()
    return (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes(), tail


def test_output_is_relayed_byte_for_byte(tmp_path: Path) -> None:
    raw = bytes(range(256)) * 3 + b"\r\x08 progress\r\n\n\n last line without an end"
    out, err, tail = relay_output(f"import os; os.write(1, {raw!r}); os.write(2, b'told\\n')", tmp_path)
    assert (out, err, tail) == (raw, b"told\n", "told\n")


def test_refused_handshake_is_explained_once(tmp_path: Path) -> None:
    tls = "I1122 7 ssl.cc:25] Handshake failed with error SSL_ERROR_SSL: x:PEER_DID_NOT_RETURN_A_CERTIFICATE: y\n"
    _, err, tail = relay_output(f"import os; [os.write(2, {tls.encode()!r}) for _ in range(2)]", tmp_path)
    ours = "whale-nebula: worker gpu/0: TLS handshake refused: the other side presents no certificate (NB-425)\n"
    assert (err.decode(), tail) == (tls + ours + tls, tls + tls)


@pytest.mark.parametrize(
    ("code", "out"),
    [
        (r"os.write(1, b'a\nb')", b"[gpu/0] a\n[gpu/0] b\n"),  # a last line is ended
        (r"os.write(1, b'x' * 3_000_000 + b'y\nz')", b"[gpu/0] " + b"x" * 3_000_000 + b"y\n[gpu/0] z\n"),
        (r"os.write(1, b'\r\x08\x08\r4/4 done\n')", b"[gpu/0] 4/4 done\n"),  # a bar is not written over a name
    ],
    ids=["lines", "a long one", "a bar"],
)
def test_lines_are_prefixed_with_the_workers_name(code: str, out: bytes, tmp_path: Path) -> None:
    assert relay_output(f"import os; {code}", tmp_path, {"out": "[gpu/0] "})[0] == out


def test_lines_written_concurrently_are_not_mixed(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        sink = Sink(out.fileno())
        lines = [bytes([65 + number]) * 50_000 + b"\n" for number in range(4)]
        threads = [threading.Thread(target=lambda line=line: [sink.write(line) for _ in range(20)]) for line in lines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    assert sorted(found) == sorted(lines * 20)


def test_closed_reader_does_not_block_the_worker(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [sys.executable, "-c", "import os; os.write(1, b'x' * 5_000_000); os.write(2, b'done')"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with (tmp_path / "err").open("wb") as err:
        relay = Relay("gpu/0", process, {"out": Sink(writing), "err": Sink(err.fileno())}, {})
        assert process.wait(60) == 0
        assert relay.close()[1] == "done"
    os.close(writing)


def test_nonblocking_file_loses_no_output(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    writer = threading.Thread(target=lambda: [Sink(writing).write(b"x" * 1_000_000), os.close(writing)])
    writer.start()
    with open(reading, "rb") as read:
        assert read.read() == b"x" * 1_000_000
    writer.join()


def test_only_the_end_of_stderr_is_retained(tmp_path: Path) -> None:
    _, err, tail = relay_output("import sys; sys.stderr.write(('x' * 99 + '\\n') * 1_050 + 'NB-401 gone\\n')", tmp_path)
    assert len(err) > 100_000
    assert len(tail) <= 4096
    assert find_last_error_line(tail) == "NB-401 gone"


def test_final_nebula_error_is_retained_but_not_relayed(tmp_path: Path) -> None:
    text = (
        "whale_nebula.errors.StateError: NB-305 caught, and printed\n"
        "  mend: none\n"
        "whale-nebula: worker gpu/0 failed with an error\n"
        "Traceback (most recent call last):\n"
        "whale_nebula.errors.StateError: NB-305 not now (a.py:3)\n"
        "  why: so\n"
        "       it is\n"
        "  mend: wait\n"
        "  at exit\n"
    )
    _, err, tail = relay_output(f"import os; os.write(2, {text.encode()!r})", tmp_path, {"err": "[gpu/0] "})
    lines = text.splitlines()
    assert err.decode().splitlines() == [f"[gpu/0] {line}" for line in (*lines[:4], lines[-1])]
    assert tail == text
