"""Which approval is of a program's code: looked up by the launcher before it starts, and by each worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from whale_nebula.config import Config
from whale_nebula.errors import NotApprovedError
from whale_nebula.security import code, files
from whale_nebula.security.approval import Approval, Found, read_all
from whale_nebula.security.identity import Identity
from whale_nebula.security.trust import DenyList, Trust


def read_approvals(config: Config, source: str | None, cluster: str | None) -> tuple[Path, Sequence[Found]]:
    """The folder of a config's approvals, and those that an authority in `ca.pem` has signed for a cluster, or why they
    do not count. The authority is the one that the config names, also where a launcher makes certificates for one run.
    """
    base = Path(source or "").parent
    folder = base / Path(config.approvals or "approvals").expanduser()
    paths = files.Files.of(config.security, Identity(config.run_name, "any"), base)
    authorities = files.certificates(files.read(paths.ca, "the authority's certificate"), str(paths.ca))
    trust = Trust(authorities, DenyList(paths.revoked, authorities))
    return folder, read_all(folder, trust, config.run, files.now(), cluster)


def check_script(config: Config, source: str | None, cluster: str | None, script: str) -> None:
    """Refuse to start a script that no approval is of. Looked at are the script, the modules beside it that the
    approval names, and the versions of packages; what it loads from elsewhere its workers look at.
    """
    folder, found = read_approvals(config, source, cluster)
    packages = code.list_packages()

    def compare(approval: Approval) -> str | None:
        beside = code.list_beside(script, approval.files)
        known = {name: value for name, value in packages.items() if name in approval.packages}
        return code.first_difference(beside, approval.files) or code.first_difference(known, approval.packages)

    choose_approval(folder, found, Path(script), compare)


def check_process(folder: Path, found: Sequence[Found]) -> Found:
    """The newest approval of the script, modules and packages of this process. A package that was not there when it was
    made differs once it is loaded.
    """
    own, packages = code.list_files(), code.list_packages()

    def compare(approval: Approval) -> str | None:
        if code.SCRIPT not in own:
            return "what runs here is no script in a file"
        used = {name: value for name, value in packages.items() if name in approval.packages or code.is_loaded(name)}
        return code.first_difference(own, approval.files) or code.first_difference(used, approval.packages)

    return choose_approval(folder, found, code.find_script(), compare)


def choose_approval(
    folder: Path, found: Sequence[Found], script: Path | None, compare: Callable[[Approval], str | None]
) -> Found:
    """The newest approval from which nothing differs, by `compare`; without one, a refusal that names the first
    difference from the nearest.
    """
    digest = None if script is None else code.digest_file(script)
    differences: list[tuple[int, str]] = []
    for each in found:
        if each.approval is None or each.fault:
            continue
        why = compare(each.approval)
        if why is None:
            return each
        same, named = digest == each.approval.files.get(code.SCRIPT), script and script.name == each.approval.script
        differences.append((2 * same + bool(named), f"{each.folder.name}: {why}"))
    faults = "\n".join(f"{each.folder.name}: {each.fault}" for each in found)
    raise NotApprovedError(
        f"{script.name if script else 'what this process runs'} is not approved",
        where=str(folder),
        why=max(differences, key=lambda each: each[0])[1] if differences else faults or "the folder has no approval",
    )
