"""Files are written atomically; keys are refused if others can read them."""

import os
import stat
import threading
from pathlib import Path

import pytest

from tests.unit.security.authorities import GPU
from whale_nebula.config import Security
from whale_nebula.errors import CredentialsError
from whale_nebula.security import Files, files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_0600_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o277)
    try:
        files.write(tmp_path / "key", b"x", files.SECRET)
        files.write(tmp_path / "cert", b"x", files.PUBLIC)
    finally:
        os.umask(old)
    assert (mode(tmp_path / "key"), mode(tmp_path / "cert")) == (0o600, 0o644)


def test_nothing_is_left_beside_what_was_written(tmp_path: Path) -> None:
    files.write(tmp_path / "key", b"one", files.SECRET)
    files.write(tmp_path / "key", b"two", files.SECRET)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").read_bytes() == b"two"


def test_what_must_not_be_replaced_stays(tmp_path: Path) -> None:
    files.write(tmp_path / "ca.pem", b"one", files.PUBLIC, replace=False)
    with pytest.raises(CredentialsError):
        files.write(tmp_path / "ca.pem", b"two", files.PUBLIC, replace=False)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("ca.pem", b"one")]


def test_a_folder_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="No such file"):
        files.write(tmp_path / "no" / "key", b"x", files.SECRET)


def test_a_reader_sees_the_old_or_the_new_and_nothing_between(tmp_path: Path) -> None:
    path, texts = tmp_path / "key", [b"a" * 50_000, b"b" * 50_000]
    files.write(path, texts[0], files.SECRET)
    seen: set[bytes] = set()
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(40):
        files.write(path, texts[number % 2], files.SECRET)
    ended.set()
    reader.join(10)
    assert seen <= set(texts)


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o644, 0o601])
def test_a_key_that_others_can_read_is_refused_with_the_line_that_mends_it(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "key"
    files.write(path, b"x", bits)
    with pytest.raises(CredentialsError) as told:
        files.read(path, "the key", secret=True)
    assert f"chmod 600 {path}" in told.value.mend
    assert files.read(path, "the key") == b"x"


def test_the_files_of_a_config_lie_beside_it() -> None:
    found = Files.of(Security(), GPU, "/srv/run")
    assert found == Files.under("/srv/run/certs", GPU)
    assert found.revoked == Path("/srv/run/certs/revoked.json")


def test_a_config_may_name_the_deny_list_or_say_that_there_is_none(tmp_path: Path) -> None:
    assert Files.of(Security(revoked="lists/{cluster}.json"), GPU, tmp_path).revoked == tmp_path / "lists/gpu.json"
    found = Files.of(Security(revoked="none"), GPU, tmp_path)
    assert (found.revoked, Files.from_dict(found.as_dict()).revoked) == (None, None)


def test_files_are_handed_on_as_text(tmp_path: Path) -> None:
    found = Files.under(tmp_path, GPU)
    assert Files.from_dict(found.as_dict()) == found
    assert Files.from_dict(found._replace(revoked=None).as_dict()).revoked is None
    with pytest.raises(CredentialsError, match="cert, key"):
        Files.from_dict({"ca": "x"})


@pytest.mark.parametrize(
    ("mode", "owner", "user", "private"),
    [
        (0o600, 1000, 1000, True),
        (0o400, 1000, 1000, True),
        (0o640, 1000, 1000, False),  # a group that the user chose
        (0o440, 0, 1000, True),  # a secret that Kubernetes projects for a pod with fsGroup
        (0o440, 0, 0, False),
        (0o444, 0, 1000, False),
        (0o460, 0, 1000, False),
    ],
)
def test_a_group_may_read_a_key_only_where_root_owns_it(
    mode: int, owner: int, user: int, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, owner, 0, 0, 0, 0))
    assert files.is_private(found) is private


def test_other_keys_beside_ones_own_are_found(tmp_path: Path) -> None:
    for name in ("gpu-gateway-0.key", "gpu-worker-0.key", "ca.key", "gpu-worker-0.pem"):
        (tmp_path / name).touch()
    paths = Files.under(tmp_path, GPU)
    assert [path.name for path in files.find_other_keys(paths)] == ["ca.key", "gpu-gateway-0.key"]
