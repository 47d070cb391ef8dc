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


def test_file_modes_are_independent_of_umask(tmp_path: Path) -> None:
    old = os.umask(0o277)
    try:
        files.write(tmp_path / "key", b"x", files.SECRET)
        files.write(tmp_path / "cert", b"x", files.PUBLIC)
    finally:
        os.umask(old)
    assert (mode(tmp_path / "key"), mode(tmp_path / "cert")) == (0o600, 0o644)


def test_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    files.write(tmp_path / "key", b"one", files.SECRET)
    files.write(tmp_path / "key", b"two", files.SECRET)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").read_bytes() == b"two"


def test_write_without_replace_keeps_existing_file(tmp_path: Path) -> None:
    files.write(tmp_path / "ca.pem", b"one", files.PUBLIC, replace=False)
    with pytest.raises(CredentialsError):
        files.write(tmp_path / "ca.pem", b"two", files.PUBLIC, replace=False)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("ca.pem", b"one")]


def test_write_to_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="No such file"):
        files.write(tmp_path / "no" / "key", b"x", files.SECRET)


def test_concurrent_reader_sees_only_complete_files(tmp_path: Path) -> None:
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
def test_key_readable_by_others_is_refused_with_chmod_command(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "key"
    files.write(path, b"x", bits)
    with pytest.raises(CredentialsError) as caught:
        files.read(path, "the key", secret=True)
    assert f"chmod 600 {path}" in caught.value.mend
    assert files.read(path, "the key") == b"x"


def test_default_files_are_next_to_the_config() -> None:
    found = Files.from_config(Security(), GPU, "/srv/run")
    assert found == Files.in_folder("/srv/run/certs", GPU)
    assert found.revoked == Path("/srv/run/certs/revoked.json")


def test_config_can_set_deny_list_path_or_none(tmp_path: Path) -> None:
    assert (
        Files.from_config(Security(revoked="lists/{cluster}.json"), GPU, tmp_path).revoked
        == tmp_path / "lists/gpu.json"
    )
    found = Files.from_config(Security(revoked="none"), GPU, tmp_path)
    assert (found.revoked, Files.from_dict(found.as_dict()).revoked) == (None, None)


def test_files_survive_dict_round_trip(tmp_path: Path) -> None:
    found = Files.in_folder(tmp_path, GPU)
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
def test_group_readable_key_is_private_only_if_owned_by_root(
    mode: int, owner: int, user: int, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, owner, 0, 0, 0, 0))
    assert files.is_private(found) is private


def test_find_other_keys_lists_keys_in_the_same_folder(tmp_path: Path) -> None:
    for name in ("gpu-gateway-0.key", "gpu-worker-0.key", "ca.key", "gpu-worker-0.pem"):
        (tmp_path / name).touch()
    paths = Files.in_folder(tmp_path, GPU)
    assert [path.name for path in files.find_other_keys(paths)] == ["ca.key", "gpu-gateway-0.key"]
