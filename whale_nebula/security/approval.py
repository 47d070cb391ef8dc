"""Signed approvals of programs by the owner of a cluster, each in its own folder.

    approvals/
      train-1f3a.../
        approval.json           the program's digests, signed by the run's authority
        train_step.plan.json    the plan of each step

The authority's key signs them on the host that issues certificates; a worker needs `ca.pem` to read them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from whale_nebula.config import Config
from whale_nebula.errors import CredentialsError, NotApprovedError
from whale_nebula.security import code, files
from whale_nebula.security.authority import Authority, check_lifetime
from whale_nebula.security.chain import encode_canonical
from whale_nebula.security.identity import Identity
from whale_nebula.security.trust import DenyList, Trust

FORMAT = "whale_nebula approval 1"
NAME = "approval.json"
DAYS = 90.0
_SIGNATURE_PREFIX = b"whale_nebula approval 1\0"
_TABLES = ("files", "packages", "plans")
_SERIAL = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Approval:
    """An approval of a program: the digests of the script with its modules, of the packages and of each step's plan;
    its times, as text; and the approver and the reason.
    """

    run: str
    serial: str
    script: str
    files: Mapping[str, str]
    packages: Mapping[str, str]
    plans: Mapping[str, str]
    since: str
    until: str
    by: str = ""
    why: str = ""

    def is_over(self, at: datetime) -> bool:
        """Whether it has expired."""
        return at > datetime.strptime(self.until, files.TIME).replace(tzinfo=UTC)


@dataclass(frozen=True)
class FoundApproval:
    """An approval in a folder; `fault` is the reason why it is invalid, or ""."""

    folder: Path
    approval: Approval | None = None
    fault: str = ""


def save(
    folder: Path,
    authority: Authority,
    script: str,
    code_digests: tuple[Mapping[str, str], Mapping[str, str]],
    plans: Mapping[str, bytes],
    *,
    days: float = DAYS,
    by: str = "",
    why: str = "",
    at: datetime | None = None,
) -> FoundApproval:
    """Sign an approval, and write it to a new folder: its plans first, so that an incomplete one is not an approval.
    `code_digests` are those of the files and of the packages.
    """
    moment, serial = at or files.now(), secrets.token_hex(20)
    until = min(moment + check_lifetime(days), authority.certificate.not_valid_after_utc)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in plans.items()}
    times = files.format_time(moment), files.format_time(until)
    approval = Approval(authority.run, serial, script, *code_digests, digests, *times, by, why)
    content = {"format": FORMAT, **asdict(approval)}
    signature = base64.b64encode(
        authority.key.sign(_SIGNATURE_PREFIX + encode_canonical(content), files.SIGNATURE)
    ).decode("ascii")
    own_folder = folder / f"{Path(script).stem}-{serial[:8]}"
    try:
        own_folder.mkdir(parents=True)
    except OSError as error:
        raise CredentialsError(f"cannot create {own_folder}", why=error.strerror, mend="approvals: approvals") from None
    for name, data in plans.items():
        files.write(own_folder / make_plan_filename(name), data, files.PUBLIC)
    text = json.dumps({**content, "signature": signature}, indent=1, sort_keys=True)
    files.write(own_folder / NAME, f"{text}\n".encode(), files.PUBLIC)
    return FoundApproval(own_folder, approval)


def make_plan_filename(step: str) -> str:
    """The name of the file with the plan of a step.

    >>> make_plan_filename("net.train_step")
    'net.train_step.plan.json'
    """
    return f"{''.join(each if each.isalnum() or each in '._-' else '_' for each in step)}.plan.json"


def read_all(
    folder: Path, trust: Trust, run: str | None, at: datetime, cluster: str | None = None
) -> Sequence[FoundApproval]:
    """All approvals in a folder, the newest first; `fault` is set for those that are invalid for the cluster."""
    found = [_read_approval(each.parent, trust, run, at, cluster) for each in sorted(folder.glob(f"*/{NAME}"))]
    return sorted(found, key=lambda each: each.approval.since if each.approval else "", reverse=True)


def _read_approval(folder: Path, trust: Trust, run: str | None, at: datetime, cluster: str | None) -> FoundApproval:
    try:
        content = json.loads(files.read(folder / NAME, "an approval"))
        signature = base64.b64decode(content.pop("signature"), validate=True)
        message = _SIGNATURE_PREFIX + encode_canonical(content)
        if content.pop("format") != FORMAT:
            return FoundApproval(folder, fault=f"its format is not {FORMAT!r}")
        approval = Approval(**{each.name: content[each.name] for each in fields(Approval)})
        is_expired = _check_types(approval).is_over(at)
    except CredentialsError as error:
        return FoundApproval(folder, fault=f"it cannot be read: {error.why}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return FoundApproval(folder, fault="it cannot be parsed")
    signed = [each for each in trust.authorities if files.verify_signature(each, signature, message)]
    signed = [each for each in signed if files.find_authority_run(each) == approval.run]
    if not signed:
        return FoundApproval(
            folder, fault="it is not signed by the run's authority: it was modified, or belongs to another run"
        )
    allowed_clusters = files.list_authority_clusters(signed[0])
    if cluster is not None and allowed_clusters and cluster not in allowed_clusters:
        return FoundApproval(
            folder, approval, f"its signer may approve programs for {', '.join(allowed_clusters)}, not for {cluster}"
        )
    if run is not None and approval.run != run:
        return FoundApproval(folder, approval, f"it is for run {approval.run!r}")
    withdrawn = trust.denied.find(approval.serial, trust.authorities, signed[0])
    if withdrawn is not None:
        return FoundApproval(
            folder, approval, f"it was withdrawn {withdrawn.when}{': ' * bool(withdrawn.why)}{withdrawn.why}"
        )
    if is_expired:
        return FoundApproval(folder, approval, f"it expired at {approval.until}")
    return FoundApproval(folder, approval)


def _check_types(approval: Approval) -> Approval:
    for each in fields(Approval):
        value = getattr(approval, each.name)
        texts = [*value, *value.values()] if each.name in _TABLES else [value]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(each.name)
    if _SERIAL.fullmatch(approval.serial) is None:
        raise ValueError("invalid serial number of an approval")
    return approval


def read_plan(found: FoundApproval, step: str) -> bytes:
    """The approved plan of a step, after its digest is verified."""
    path = found.folder / make_plan_filename(step)
    data = files.read(path, "an approved plan", most=None)
    if found.approval is None or hashlib.sha256(data).hexdigest() != found.approval.plans.get(step):
        raise NotApprovedError(
            f"the plan of {step} is not the approved one",
            where=str(path),
            why="its digest differs from the one in the signed approval",
            mend="copy the folder of the approval again from the host that created it",
        )
    return data


def read_approvals(config: Config, source: str | None, cluster: str | None) -> tuple[Path, Sequence[FoundApproval]]:
    """The folder of a config's approvals, and the approvals in it, with the faults of those that are invalid for the
    cluster. The authority is the one in the config, even if a launcher issues certificates for one run.
    """
    base = Path(source or "").parent
    folder = base / Path(config.approvals or "approvals").expanduser()
    paths = files.Files.from_config(config.security, Identity(config.run_name, "any"), base)
    authorities = files.parse_certificates(files.read(paths.ca, "the authority's certificate"), str(paths.ca))
    trust = Trust(authorities, DenyList(paths.revoked, authorities))
    return folder, read_all(folder, trust, config.run, files.now(), cluster)


def check_script(config: Config, source: str | None, cluster: str | None, script: str) -> FoundApproval:
    """The approval of a script that is about to be started; refused without a valid one. This compares the script, the
    modules in its folder that the approval names, and the versions of packages; the workers compare modules loaded from
    elsewhere.
    """
    folder, approvals = read_approvals(config, source, cluster)
    packages = code.list_packages()

    def compare(approval: Approval) -> str | None:
        present = code.list_adjacent_modules(script, approval.files)
        compared = {name: value for name, value in packages.items() if name in approval.packages}
        hiding = code.find_hiding_module(script, approval.files)
        if hiding is not None:
            return f"{hiding} next to the script hides an installed or standard module, and was not approved"
        return code.find_difference(present, approval.files) or code.find_difference(compared, approval.packages)

    return choose_approval(folder, approvals, Path(script), compare)


def check_process(folder: Path, approvals: Sequence[FoundApproval]) -> FoundApproval:
    """The newest approval of the script, modules and packages of this process. A package that was not installed when
    the program was approved counts as a difference once it is loaded.
    """
    modules, packages = code.list_files(), code.list_packages()

    def compare(approval: Approval) -> str | None:
        if code.SCRIPT not in modules:
            return "this process does not run a script in a file"
        used = {name: value for name, value in packages.items() if name in approval.packages or code.is_loaded(name)}
        return code.find_difference(modules, approval.files) or code.find_difference(used, approval.packages)

    return choose_approval(folder, approvals, code.find_script(), compare)


def choose_approval(
    folder: Path, approvals: Sequence[FoundApproval], script: Path | None, compare: Callable[[Approval], str | None]
) -> FoundApproval:
    """The newest approval for which `compare` finds no difference. If there is none, raises `NotApprovedError` with the
    first difference from the closest approval.
    """
    digest = None if script is None else code.digest_file(script)
    differences: list[tuple[int, str]] = []
    for each in approvals:
        if each.approval is None or each.fault:
            continue
        why = compare(each.approval)
        if why is None:
            return each
        has_same_digest = digest == each.approval.files.get(code.SCRIPT)
        has_same_name = script is not None and script.name == each.approval.script
        differences.append((2 * has_same_digest + has_same_name, f"{each.folder.name}: {why}"))
    faults = "\n".join(f"{each.folder.name}: {each.fault}" for each in approvals)
    raise NotApprovedError(
        f"{script.name if script else 'the program of this process'} is not approved",
        where=str(folder),
        why=max(differences, key=lambda each: each[0])[1] if differences else faults or "the folder has no approvals",
    )
