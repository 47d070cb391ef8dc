"""The account under which a run is started, and its folder on a host.

A folder of an account contains a mark file, and everything below the folder belongs to that account: runs of another
account, or of none, do not read or write there. Its mode excludes other users of the host; processes of the same user
are not isolated from each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from whale_nebula.errors import AccountError, CredentialsError, IdentityError, NebulaError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import files
from whale_nebula.security.allowance import UNLIMITED, Allowance, format_bytes
from whale_nebula.security.chain import encode_canonical
from whale_nebula.security.credentials import Credentials
from whale_nebula.security.files import Files, Peer

ACCOUNT = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
"""The syntax of an account's name."""
FOLDER, MARK = "accounts", ".account"
_PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class Tenant:
    """An account: its name, the cluster in which it trains, the key of the authority that certifies it, and its limits.

    >>> ana = Tenant("ana", "gpu", "7a")
    >>> str(ana), ana.home(Path("/srv")).as_posix()
    ('account ana of gpu', '/srv/accounts/gpu/ana')
    """

    account: str
    cluster: str
    authority: str
    allowance: Allowance = UNLIMITED

    @classmethod
    def from_certificate(cls, peer: Peer) -> Tenant | None:
        """The account that a certificate names; None if it names none."""
        if not peer.account:
            return None
        if not ACCOUNT.fullmatch(peer.account):
            name = escape_foreign_text(peer.account, 64)
            raise CredentialsError(f"the certificate of {peer.identity.worker} names an invalid account: {name!r}")
        signer = files.find_extension(peer.certificate, x509.AuthorityKeyIdentifier)
        key = b"" if signer is None else signer.key_identifier or b""
        return cls(peer.account, peer.identity.cluster, key.hex(), peer.allowance)

    def __str__(self) -> str:
        return f"account {self.account} of {self.cluster}"

    def home(self, base: Path) -> Path:
        """The account's folder, next to a config in the folder `base`."""
        return base / FOLDER / self.cluster / self.account

    @property
    def mark(self) -> dict[str, str]:
        """The content of the mark file in its folders."""
        return {"account": self.account, "cluster": self.cluster, "authority": self.authority}


def open_home(base: Path, tenant: Tenant) -> Path:
    """The folder of an account, created if it is missing; a folder that other users can enter is refused."""
    home = tenant.home(base)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(_PRIVATE, exist_ok=True)
        status = home.stat()
    except OSError as error:
        mend = f"install -d -m 700 -o USER {home}, or move the config to your own folder"
        raise AccountError(
            f"cannot create the folder of {tenant}", where=str(home), why=error.strerror, mend=mend
        ) from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & ~_PRIVATE:
        raise AccountError(
            f"other users can enter the folder of {tenant}",
            where=str(home),
            why=f"its mode is {stat.S_IMODE(status.st_mode):04o}, and its owner is user {status.st_uid}",
            mend=f"chmod 700 {home}, and chown it to the user who starts the run",
        )
    claim_folder(home, tenant)
    return home


def claim_folder(folder: Path, tenant: Tenant) -> None:
    """Claim a folder for an account, unless it belongs to another one; an unclaimed folder gets a mark."""
    check_folder(folder, tenant)
    if _find_mark(folder) is not None:
        return
    try:
        folder.mkdir(_PRIVATE, parents=True, exist_ok=True)
        files.write(folder / MARK, encode_canonical(tenant.mark), files.PUBLIC, replace=False)
    except (OSError, CredentialsError) as error:
        if _find_mark(folder) is None:  # no other process of this run has claimed it meanwhile
            mend = f"ls -ld {folder}; or use another folder"
            raise AccountError(f"{tenant} cannot claim {folder}", why=str(error), mend=mend) from None
        check_folder(folder, tenant)


def check_folder(folder: Path, tenant: Tenant | None) -> None:
    """Check that a run of an account, or of none, may read and write in a folder."""
    found = _find_mark(folder)
    if found is None:
        return
    place, mark = found
    if tenant is None or mark != tenant.mark:
        raise AccountError(
            f"{folder} belongs to account {_describe_mark(mark)}, but this run belongs to {tenant or 'no account'}",
            where=str(place),
            why="only the runs of an account may read and write its files",
            mend="use another folder, or log in as that account: whale-nebula login --account",
        )


def check_login(folder: Path, certs: Path) -> None:
    """Check that this user has logged in as the account of a folder: its valid certificate and key are in `certs`."""
    found = _find_mark(folder)
    if found is None:
        return
    place, mark = found
    why = f"there is no certificate of an account in {certs}"
    for path in sorted(certs.glob("*.pem")):
        with contextlib.suppress(IdentityError, OSError):  # the authority's
            peer = files.read_peer(files.parse_certificate(path.read_bytes(), str(path)))
            if not peer.account:
                continue
            try:
                credentials = Credentials.load(Files.in_folder(certs, peer.identity))
                credentials.check_now()
                tenant = Tenant.from_certificate(credentials.peer)
                if tenant is not None and tenant.mark == mark:
                    return
                why = f"{path} belongs to {tenant}"
            except NebulaError as error:
                why = f"{path}: {error.what}"
    raise AccountError(
        f"{folder} belongs to account {_describe_mark(mark)}, and no user is logged in to that account here",
        where=str(place),
        why=why,
        mend="log in with whale-nebula login --account, pass the folder of the account's certificates with --certs, "
        "or use another folder",
    )


def _describe_mark(mark: Mapping[str, Any]) -> str:
    return " of ".join(escape_foreign_text(mark.get(part, "?"), 64) for part in ("account", "cluster"))


def check_disk_limit(tenant: Tenant, folders: Iterable[Path], more_bytes: int = 0) -> None:
    """Raise if an account with these folders would exceed its disk limit by writing `more_bytes`."""
    limit = tenant.allowance.disk
    if limit is None:
        return
    used = measure_disk_usage(folders)
    if used + more_bytes > limit or used >= limit:
        raise AccountError(
            f"the disk limit of {tenant} is {format_bytes(limit)} on each host, and it uses {format_bytes(used)}"
            + f"; this needs {format_bytes(more_bytes)} more" * bool(more_bytes),
            where=", ".join(map(str, folders)),
            mend="whale-nebula checkpoints prune FOLDER, or ask the owner for whale-nebula accounts limit --disk",
        )


def measure_disk_usage(folders: Iterable[Path]) -> int:
    """The bytes that all files in some folders use on disk; hard links are counted once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):  # removed meanwhile
                    status = os.lstat(os.path.join(parent, name))
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _find_mark(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The nearest mark in a path, after links are resolved, if its owner owns the folder; an unreadable mark has no
    content, so that it belongs to no account.
    """
    real = folder.resolve()
    for place in (real, *real.parents):
        path = place / MARK
        try:
            if path.lstat().st_uid != place.stat().st_uid:  # any user could have written it
                continue
            content = json.loads(path.read_bytes()[:4096])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, RecursionError):
            content = None
        return path, {str(k): str(v) for k, v in content.items()} if isinstance(content, dict) else {}
    return None
