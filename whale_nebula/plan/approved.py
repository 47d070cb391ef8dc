"""The approvals of a run whose cluster runs approved programs alone: its code and the plan of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from whale_nebula.errors import NotApprovedError
from whale_nebula.errors.text import list_names
from whale_nebula.plan.file import parse, plan_difference
from whale_nebula.plan.pins import Pins
from whale_nebula.plan.plan import Plan
from whale_nebula.security import code, files
from whale_nebula.security.approval import Approval, Found, read_all, read_plan
from whale_nebula.security.trust import DenyList, Trust

_WORDS = "here", "in the approved plan"


@dataclass
class Approvals:
    """The approvals in a folder, of which one is of the code of this process (`check_code`)."""

    folder: Path
    found: Sequence[Found]
    pins: dict[Path, Pins] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, paths: files.Files, run: str | None, cluster: str | None) -> Approvals:
        """Read the approvals that an authority in `ca.pem` has signed for a cluster, and has not withdrawn."""
        authorities = files.certificates(files.read(paths.ca, "the authority's certificate"), str(paths.ca))
        trust = Trust(authorities, DenyList(paths.revoked, authorities))
        return cls(folder, read_all(folder, trust, run, files.now(), cluster))

    def check_code(self) -> Found:
        """The newest approval of the script, modules and packages of this process; without one, a refusal that names
        the first difference from the nearest.
        """
        own, packages = code.list_files(), code.list_packages()
        differences: list[tuple[int, str, Found]] = []
        for each in self.found:
            if each.approval is not None and not each.fault:
                script, why = _compare(own, packages, each.approval)
                if not why:
                    return each
                differences.append((script, why, each))
        main = code.find_script()
        raise NotApprovedError(
            f"{main.name if main else 'what this process runs'} is not approved",
            where=str(self.folder),
            why=self._explain(differences),
        )

    def _explain(self, differences: Sequence[tuple[int, str, Found]]) -> str:
        if differences:
            _, why, nearest = max(differences, key=lambda each: each[0])
            return f"{nearest.folder.name}: {why}"
        faults = [f"{each.folder.name}: {each.fault}" for each in self.found]
        return "\n".join(faults) or "the folder has no approval"

    def check(self, plan: Plan) -> None:
        """Refuse a step that is not planned as it was approved."""
        chosen = self.check_code()
        steps = {} if chosen.approval is None else chosen.approval.plans
        pins = self.pins.setdefault(chosen.folder, Pins(dict.fromkeys(steps, (plan, ""))))
        step = pins.pin_of(plan.name)
        if step is None:
            raise NotApprovedError(
                f"{plan.name} is not approved",
                where=str(chosen.folder),
                why=f"the steps that were approved are {list_names(steps)}",
            )
        pins.met.add(step)
        approved = parse(Plan, read_plan(chosen, step), str(chosen.folder))
        difference = plan_difference(plan, approved, _WORDS)
        if difference is not None:
            raise NotApprovedError(
                f"{plan.name} is not planned as it was approved", where=str(chosen.folder), why=difference
            )


def _compare(own: Mapping[str, str], packages: Mapping[str, str], approval: Approval) -> tuple[int, str]:
    """How near an approval is, and the first difference from it, if there is one: a package that was not there when it
    was made differs once it is loaded.
    """
    main = code.find_script()
    alike = main is not None and main.name == approval.script
    near = 2 * (own.get(code.SCRIPT) == approval.files.get(code.SCRIPT)) + alike
    if code.SCRIPT not in own:
        return near, "what runs here is no script in a file"
    why = code.first_difference(own, approval.files)
    if why is None:
        used = {name: value for name, value in packages.items() if name in approval.packages or code.is_loaded(name)}
        why = code.first_difference(used, approval.packages)
    return near, why or ""
