"""Workers' output is relayed byte for byte, in whole lines."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from whale_nebula.launch.worker_exit import last_word
from whale_nebula.launch.worker_output import Relay, Sink


def relayed(code: str, tmp_path: Path, prefixes: dict[str, str] | None = None) -> tuple[bytes, bytes, str]:
    """Output, errors and the end of the errors of some Python code."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        relay = Relay("gpu/0", process, {"out": Sink(out.fileno()), "err": Sink(err.fileno())}, prefixes or {})
        process.wait(60)
        _, tail = relay.close()
    return (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes(), tail


def test_bytes_come_out_as_they_are(tmp_path: Path) -> None:
    raw = bytes(range(256)) * 3 + b"\r\x08 progress\r\n\n\n last line without an end"
    out, err, tail = relayed(f"import os; os.write(1, {raw!r}); os.write(2, b'told\\n')", tmp_path)
    assert (out, err, tail) == (raw, b"told\n", "told\n")


def test_why_somebody_was_not_let_in_is_said_in_our_words_once(tmp_path: Path) -> None:
    tls = "I1122 7 ssl.cc:25] Handshake failed with error SSL_ERROR_SSL: x:PEER_DID_NOT_RETURN_A_CERTIFICATE: y\n"
    _, err, tail = relayed(f"import os; [os.write(2, {tls.encode()!r}) for _ in range(2)]", tmp_path)
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
def test_on_a_terminal_lines_bear_names(code: str, out: bytes, tmp_path: Path) -> None:
    assert relayed(f"import os; {code}", tmp_path, {"out": "[gpu/0] "})[0] == out


def test_lines_of_workers_that_write_at_once_are_never_mixed(tmp_path: Path) -> None:
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


def test_a_reader_that_has_gone_stops_nobody(tmp_path: Path) -> None:
    ear, mouth = os.pipe()
    os.close(ear)
    process = subprocess.Popen(
        [sys.executable, "-c", "import os; os.write(1, b'x' * 5_000_000); os.write(2, b'done')"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with (tmp_path / "err").open("wb") as err:
        relay = Relay("gpu/0", process, {"out": Sink(mouth), "err": Sink(err.fileno())}, {})
        assert process.wait(60) == 0
        assert relay.close()[1] == "done"
    os.close(mouth)


def test_a_file_that_does_not_block_loses_nothing(tmp_path: Path) -> None:
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    writer = threading.Thread(target=lambda: [Sink(mouth).write(b"x" * 1_000_000), os.close(mouth)])
    writer.start()
    with open(ear, "rb") as read:
        assert read.read() == b"x" * 1_000_000
    writer.join()


def test_only_the_end_of_the_errors_is_kept(tmp_path: Path) -> None:
    _, err, tail = relayed("import sys; sys.stderr.write('x\\n' * 50_000 + 'NB-401 gone\\n')", tmp_path)
    assert len(err) > 100_000
    assert len(tail) <= 4096
    assert last_word(tail) == "NB-401 gone"


def test_by_what_error_of_ours_it_ends_is_remembered_and_not_handed_on(tmp_path: Path) -> None:
    told = (
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
    _, err, tail = relayed(f"import os; os.write(2, {told.encode()!r})", tmp_path, {"err": "[gpu/0] "})
    lines = told.splitlines()
    assert err.decode().splitlines() == [f"[gpu/0] {line}" for line in (*lines[:4], lines[-1])]
    assert tail == told
