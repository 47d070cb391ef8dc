"""`whale-nebula approve`: show a program, and sign its approval."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_nebula.cli import arguments as exits
from whale_nebula.cli.arguments import (
    Answer,
    Options,
    Parser,
    Words,
    answer,
    print_error,
    read_script,
    remark,
    user_name,
)
from whale_nebula.cli.certs import check_run, find_folder, load_config, record_change
from whale_nebula.config import Config
from whale_nebula.errors import ConfigError, NotApprovedError, PlanError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import approval, authority, files, issue
from whale_nebula.security.approval import DAYS, FoundApproval
from whale_nebula.security.authority import Authority
from whale_nebula.security.trust import DenyList, Trust

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

_DESCRIPTION = """\
Show what a program does, and sign that it may run: its plan, what crosses between clusters and on which inputs that
depends, the files of the script, and the installed packages. Workers whose config has "approvals: FOLDER" refuse
all other programs, and name the first difference from an approved one.

The script runs as with "whale-nebula show --all": its steps are planned and return zeros; nothing is trained. It runs
in a separate process without access to keys or the terminal. Sign where the authority's key is ("whale-nebula certs
init"), with the packages that the workers have; or plan where the packages are, and sign elsewhere with --record."""

_EPILOG = """\
examples:
  whale-nebula approve train.py --config clusters.yaml            show it, ask, and sign
  whale-nebula approve train.py --config clusters.yaml --yes --why "reviewed on Monday"
  whale-nebula approve train.py --config clusters.yaml --dry      show it, without signing
  whale-nebula approve train.py --dry --record train.json         on a host without the key: store the result
  whale-nebula approve train.py --record train.json               on the host with the key: show and sign it
  whale-nebula approve --list --config clusters.yaml
  whale-nebula approve --withdraw 1f3a --config clusters.yaml     put it on the deny list, revoked.json

Copy the folder of approvals, and after --withdraw also revoked.json, to every host whose config requires approvals.

exit status:
  0   signed, shown or withdrawn           65  there is no such approval
  1   refused; nothing was signed          66  the file does not exist
  2   wrong command line                   78  wrong config
  3   the script ran no step with scopes   130 interrupted"""

_OPTIONS: Options = {
    "--config": ("FILE", "clusters.yaml; overrides what the script passes to nb.init"),
    "--folder": ("FOLDER", 'the folder of the authority; default: "certs" next to the --config, or here'),
    "--days": ("DAYS", f"days of validity; default: {DAYS:g}, at most that of the authority"),
    "--why": ("TEXT", "a comment to store"),
    "--steps": ("N", "examine the first N distinct steps; default: all, until the script ends"),
    "--yes": (None, "sign without asking"),
    "--dry": (None, "sign nothing"),
    "--record": ("FILE", "with --dry: write the result to this file; otherwise: sign its content, run nothing"),
    "--list": (None, "list approvals"),
    "--withdraw": ("HEX", "an approval, by the first digits of its serial number"),
    "--json": (None, "print one JSON object"),
}


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    usage = "whale-nebula approve [options] SCRIPT [arguments of the script] | --list | --withdraw HEX"
    parser = Parser("approve", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)
    args, words = read_script(parser, argv, _OPTIONS)
    if (words.script is not None) + args.list + (args.withdraw is not None) != 1:
        parser.error("exactly one is required: a script to approve, --list, or --withdraw HEX")
    if args.steps is not None and not (args.steps.isdecimal() and int(args.steps)):
        parser.error("--steps needs a number of at least 1")
    days = parser.amount("--days", args.days, DAYS)

    def run() -> int | Answer:
        if args.list:
            return _show_approvals(args)
        return _withdraw(args) if args.withdraw is not None else _approve(args, words, days)

    codes = {NotApprovedError: exits.FAILED, PlanError: exits.NO_DATA, ConfigError: exits.CONFIG}
    return answer(args, run, codes)


def _find_folders(args: argparse.Namespace) -> tuple[Config, Path, Path]:
    """The config, the folder of the authority, and that of the approvals."""
    config, base = load_config(args), Path() if args.config is None else Path(args.config).parent
    return config, find_folder(args), base / (config.approvals or "approvals")


# ---------------------------------------------------------------------- approve
@dataclass(frozen=True)
class Program:
    """What is approved: the digests of a script's files and of packages by name, and the text of each plan."""

    files: Mapping[str, str]
    packages: Mapping[str, str]
    plans: Sequence[str]

    def parse_plans(self, where: str) -> Sequence[Plan]:
        """The plans of its steps."""
        from whale_nebula.plan.plan import parse_plan

        return [parse_plan(text, where) for text in self.plans]


RECORD_FORMAT = "whale_nebula program 1"


def _approve(args: argparse.Namespace, words: Words, days: float) -> int:
    path = words.script or ""
    if not Path(path).is_file():
        error = ConfigError(f"file {path!r} does not exist", mend="whale-nebula approve path/to/train.py")
        return print_error(error, as_json=args.json, code=exits.NO_FILE)
    config, folder, approvals = _find_folders(args)
    signer = None if args.dry else _load_signer(folder, config, days)
    plan_program = _plan_script if args.dry else _plan_in_subprocess
    program = plan_program(path, words, args) if args.dry or args.record is None else read_record(Path(args.record))
    if isinstance(program, int):
        return program
    plans, name = program.parse_plans(args.record or path), Path(path).name
    if args.dry and args.record is not None:
        write_record(Path(args.record), program)
    if signer is not None:
        _check_unchanged(path, program, beside_only=args.record is not None)
    if not args.json:
        print(describe(plans, program))
    digests = [plan.digest for plan in plans]
    document = {"script": name, "files": program.files, "packages": program.packages, "plans": digests}
    if signer is None or not (args.yes or _ask_for_confirmation(path)):
        if args.json:
            print(json.dumps({**document, "signed": False}, indent=1))
        else:
            remark("nothing was signed")
        return exits.DONE if args.dry else exits.FAILED
    texts = {plan.name: text.encode() for plan, text in zip(plans, program.plans, strict=True)}
    code, approver = (program.files, program.packages), user_name()
    found = approval.save(approvals, signer, name, code, texts, days=days, by=approver, why=args.why or "")
    record_change(folder, "approve", args.why, {"changed": _describe_signed(found, digests)})
    if args.json:
        print(json.dumps({**document, "signed": True, **_make_document(found)}, indent=1))
    else:
        print(
            f"\nsigned: {found.folder}   {_describe_approval(found)}\n"
            "copy this folder to every host whose config requires approvals"
        )
        if config.approvals is None:
            print(f"to require approvals, add to the config: approvals: {approvals.name}")
    return exits.DONE


def _load_signer(folder: Path, config: Config, days: float) -> Authority:
    """Load the authority, which must be valid for the certificate's days."""
    signer = authority.load(folder)
    authority.check_current(signer)
    authority.check_lifetime(days)
    check_run(signer, config, folder, mend="--folder FOLDER: the folder of this run's authority")
    return signer


def _plan_script(path: str, words: Words, args: argparse.Namespace) -> Program | int:
    """Run the script in this process; returns the program, or the exit status if the script runs no step or fails."""
    from whale_nebula.cli.show_script import PlanCollector, collect_plans, report_nothing
    from whale_nebula.security import code

    collector = PlanCollector(math.inf if args.steps is None else int(args.steps), args.config, None)
    ending = collect_plans(path, words.arguments, collector)
    if not collector.plans or ending.error is not None:
        return report_nothing(path, ending, collector, args.json, "approve")
    return Program(code.list_files(path), code.list_packages(), [plan.to_file() for plan in collector.plans])


def _plan_in_subprocess(path: str, words: Words, args: argparse.Namespace) -> Program | int:
    """Run the script in a separate process; returns the program, or the exit status if there is none. The process has
    no terminal, so it cannot confirm for the approver, and its group is killed at its end.
    """
    options = [f"--{name}={value}" for name in ("config", "steps") if (value := getattr(args, name)) is not None]
    with tempfile.TemporaryDirectory() as folder:
        record, output = Path(folder) / "program.json", Path(folder) / "output"
        command = [sys.executable, "-m", "whale_nebula", "approve", "--dry", f"--record={record}", *options]
        command += ["--json"] * args.json + [path, "--", *words.arguments]
        with (
            output.open("wb") as out,
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, start_new_session=True) as child,
        ):
            try:
                status = child.wait()
            except KeyboardInterrupt:
                status = exits.INTERRUPTED
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        if status == exits.DONE:
            return read_record(record)
        print(output.read_text("utf-8", "replace"), end="")
    return exits.shell_code(status)


def write_record(path: Path, program: Program) -> None:
    """Write the description of a program to a file."""
    try:
        path.write_text(json.dumps({"format": RECORD_FORMAT, **asdict(program)}, indent=1), "utf-8")
    except OSError as error:
        raise PlanError(f"{path} cannot be written", why=error.strerror, mend="--record train.json") from None


def read_record(path: Path) -> Program:
    """Read the description of a program from an untrusted file."""
    mend = "whale-nebula approve train.py --dry --record train.json"
    try:
        fields = json.loads(path.read_bytes())
        if fields.pop("format") != RECORD_FORMAT:
            raise ValueError(f"its format is not {RECORD_FORMAT!r}")
        program = Program(**fields)
        texts = [text for table in (program.files, program.packages) for pair in table.items() for text in pair]
        if not all(isinstance(text, str) for text in (*texts, *program.plans)):
            raise TypeError("plans")
        return program
    except OSError as error:
        raise PlanError(f"the record {path} cannot be read", why=error.strerror, mend=mend) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise PlanError(f"{path} is not the record of a program", mend=mend) from None


def _check_unchanged(path: str, program: Program, *, beside_only: bool) -> None:
    """Refuse a program that differs from the script and the modules next to it, or, unless `beside_only`, from the
    installed packages.
    """
    from whale_nebula.security import code

    present, examined = code.list_adjacent_modules(path, program.files), program.files
    if not beside_only:
        present, examined = {**present, **code.list_packages()}, {**examined, **program.packages}
    other = next((name for name, value in present.items() if examined.get(name) != value), None)
    if other is not None:
        raise NotApprovedError(
            f"{path} differs from the examined program: nothing is signed",
            where="the script" if other == code.SCRIPT else other,
            why=f"it is {present[other][:12]} here, but {examined.get(other, 'nothing')[:12]} in the examined program",
            mend="run whale-nebula approve again; if it still differs, check whether the script manipulates this check",
        )


def _ask_for_confirmation(path: str) -> bool:
    if not sys.stdin.isatty():
        remark("there is no terminal to ask for confirmation: --yes signs without asking")
        return False
    print(f"\nMay {path} run, as described above? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def describe(plans: Sequence[Plan], program: Program) -> str:
    """Describe a program as text: its plans, the inputs on which crossing values depend, its files and packages."""
    from whale_nebula.plan.text import list_dependences

    lines = []
    for plan in plans:
        inputs = list(dict.fromkeys(name for each in plan.crossings for name in each.depends))
        table = list(list_dependences(plan, inputs).text()) or ["no value depends on an input"]
        lines += [
            plan.to_text(),
            "",
            "values that cross, and the inputs on which they depend",
            *(f"  {row}".rstrip() for row in table),
            "",
        ]
    lines += ["files of the script", *(f"  {name}  {value[:12]}" for name, value in program.files.items()), ""]
    installed = ", ".join(f"{name} {value.partition(' ')[0]}" for name, value in program.packages.items())
    lines.append(f"{len(program.packages)} packages: {installed}")
    return escape_foreign_text("\n".join(lines), 1 << 24, lines=True)


def _describe_signed(found: FoundApproval, digests: Sequence[str]) -> list[str]:
    """What was signed, for the owner's log: the script with its digest, the digests of the plans, and the approval's
    serial number and end.
    """
    from whale_nebula.security import code

    approved = found.approval
    if approved is None:
        return []
    script = f"{approved.script} {approved.files.get(code.SCRIPT, '')}"
    return [script, *(f"plan {each}" for each in digests), f"approval {approved.serial} until {approved.until}"]


# ---------------------------------------------------------------------- list, withdraw
def _list_approvals(args: argparse.Namespace, signer: Authority | None = None) -> Sequence[FoundApproval]:
    """All approvals; those that are not signed by `signer`, or by default by a trusted owner, have a fault."""
    config, folder, approvals = _find_folders(args)
    known, revoked = authority.load_certificates(folder), folder / files.REVOKED
    denied = DenyList(revoked if revoked.exists() else None, known)
    trust = Trust(known if signer is None else [signer.certificate], denied)
    return approval.read_all(approvals, trust, config.run, files.now())


def _show_approvals(args: argparse.Namespace) -> Answer:
    found = _list_approvals(args)
    lines = [f"{each.folder.name}   {each.fault or _describe_approval(each)}" for each in found]
    return [_make_document(each) for each in found], "\n".join(lines) or "there are no approvals"


def _make_document(found: FoundApproval) -> dict[str, Any]:
    approved = found.approval
    fields = (
        {}
        if approved is None
        else {"serial": approved.serial, "until": approved.until, "by": approved.by, "why": approved.why}
    )
    return {"folder": str(found.folder), "good": not found.fault, "fault": found.fault, **fields}


def _describe_approval(found: FoundApproval) -> str:
    approved = found.approval
    if approved is None:
        return ""
    why = f", {approved.why}" * bool(approved.why)
    return f"serial {approved.serial[:16]}   until {approved.until}   by {approved.by}{why}"


def _withdraw(args: argparse.Namespace) -> Answer:
    _, folder, approvals = _find_folders(args)
    signer, digits = authority.load(folder), args.withdraw.lower()
    matching = [
        each.approval
        for each in _list_approvals(args, signer)
        if each.approval and digits and each.approval.serial.startswith(digits)
    ]
    if len(matching) != 1:
        count_text = f"{len(matching)} approvals have" if matching else "no approval of this authority has"
        what = f"{count_text} a serial that begins with {args.withdraw!r}"
        raise PlanError(what, where=str(approvals), mend="whale-nebula approve --list")
    number = issue.withdraw(folder, signer, matching[0].serial, f"approval of {matching[0].script}", args.why or "")
    record_change(folder, "withdraw approval", args.why, {"changed": [f"{matching[0].script} {matching[0].serial}"]})
    text = f"withdrawn: {matching[0].serial[:16]}, in deny list number {number}"
    text += f"\ncopy to every host whose config requires approvals: {folder / files.REVOKED}"
    return {"withdrawn": matching[0].serial, "deny_list": number}, text
