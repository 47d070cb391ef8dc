"""`whale-nebula checkpoints`: list, show, verify, prune and export checkpoints. Only export needs TensorFlow."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from whale_nebula.checkpoint.files import is_local
from whale_nebula.checkpoint.folder import Folder, FoundCheckpoint
from whale_nebula.checkpoint.manifest import STATES, Manifest
from whale_nebula.checkpoint.parts import describe_waiting
from whale_nebula.cli import arguments
from whale_nebula.cli.arguments import Answer, Options, Parser, answer, print_error, read_words
from whale_nebula.errors import AccountError, CheckpointError, NebulaError
from whale_nebula.errors.text import did_you_mean, escape_foreign_text
from whale_nebula.plain import to_plain
from whale_nebula.report.records import size
from whale_nebula.security.tenant import check_login

_DESCRIPTION = """\
Inspect checkpoints written by nb.init(checkpoint="FOLDER") or nb.save. FOLDER is the folder of a run, or of one
checkpoint in it.

  list    list the checkpoints of a run: steps, sizes, dates
  show    show one checkpoint, the newest by default: the position of the run, and its tensors
  verify  read every file and compare its digest; the first fault of each checkpoint is printed
  prune   remove all but the newest complete checkpoints, --keep of them
  export  write the complete tensors to one file: --to weights.npz, or weights.safetensors

Checkpoints of an account's runs can be read only by hosts that are logged in with that account (--certs).

In Python, nb.restore("FOLDER", model) restores the newest weights, with or without scopes, and
tf.train.load_checkpoint("FOLDER/step-00000120/state") reads single tensors."""

_EPILOG = """\
examples:
  whale-nebula checkpoints list runs/a
  whale-nebula checkpoints show runs/a/step-00000120
  whale-nebula checkpoints verify runs/a --json
  whale-nebula checkpoints prune runs/a --keep 2
  whale-nebula checkpoints export runs/a --to weights.npz --only "encoder/.*"

exit status:
  0   done; for verify: all checkpoints are complete
  1   verify: a checkpoint is damaged; export: not written, or no tensor matches; or an account's login is missing
  2   wrong command line
  66  there is no checkpoint"""

_OPTIONS: Options = {
    "--keep": ("N", "prune: how many to keep"),
    "--to": ("FILE", "export: the file to write, .npz or .safetensors"),
    "--only": ("REGEX", "show and export: only tensors whose full name matches"),
    "--certs": ("FOLDER", 'certificates of the account that owns the checkpoints; default: "certs"'),
    "--json": (None, "print one JSON object"),
}


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    usage = "whale-nebula checkpoints {list,show,verify,prune,export} FOLDER [options]"
    parser = Parser("checkpoints", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)
    args, words = read_words(parser, argv, _OPTIONS)
    command, folders = words[0] if words else "", words[1:]
    if command not in _COMMANDS:
        problem = f"unknown command {command!r}; {did_you_mean(command, _COMMANDS)}" if command else "missing command"
        parser.error(f"{problem}: whale-nebula checkpoints list FOLDER")
    if len(folders) != 1:
        parser.error(f"whale-nebula checkpoints {command} FOLDER")
    args.folder = folders[0].rstrip("/")

    def run() -> int | Answer:
        _check_account(args)
        return _COMMANDS[command](_find(args.folder), args, parser)

    return answer(args, run, {AccountError: arguments.FAILED, NebulaError: arguments.NO_FILE})


def _check_account(args: argparse.Namespace) -> None:
    """Refuse to read or write in the folder of an account, unless this user has logged in as that account."""
    for path in (args.folder, args.to):
        if path is not None and is_local(path):
            check_login(Path(path), Path(args.certs or "certs"))


def _find(path: str) -> list[FoundCheckpoint]:
    """The checkpoints in a run's folder, the newest first, or the single one of a checkpoint's folder; at least one."""
    single = Folder(path, single=True).read_single()
    found = [single] if single.manifests or single.problems else Folder(path).scan()
    if not found:
        why = "without every:, a run saves its first checkpoint after 30 s of training"
        mend = 'nb.init(checkpoint={"folder": ..., "every": 100}) saves sooner;\nor pass the folder of another run'
        raise CheckpointError("there is no checkpoint", where=path, why=why, mend=mend)
    return found


def _list(found: list[FoundCheckpoint], args: argparse.Namespace, parser: Parser) -> Answer:
    rows, lines = [_summarize(each) for each in found], []
    for row in rows:
        details = row["problem"] or f"{size(row['bytes'])}  {row['time']}  {row['where']}"
        lines.append(f"{row['folder']}  step {row['step']}  {details}")
    return {"checkpoints": rows}, "\n".join(lines)


def _summarize(found: FoundCheckpoint) -> dict[str, Any]:
    problems = found.check(digests=False)
    manifests = list(found.manifests.values())
    first = manifests[0] if manifests else None
    return {
        "folder": found.path,
        "step": found.step if first is None else first.position.step,
        "bytes": sum(manifest.size for manifest in manifests),
        "time": "" if first is None else escape_foreign_text(first.time),
        "where": "" if first is None else _describe_position(first),
        "problem": "" if not problems else (not manifests and describe_waiting(found.path)) or problems[0],
    }


def _describe_position(manifest: Manifest) -> str:
    position = manifest.position
    if manifest.is_manual:
        return "saved by nb.save"
    if not position.fit:
        return ""
    fit = f" of fit {position.fit}" if position.fit > 1 else ""
    if position.ended:
        return f"the end{fit}"
    return f"epoch {position.epoch + 1}, batch {position.batch}{fit}"


def _show(found: list[FoundCheckpoint], args: argparse.Namespace, parser: Parser) -> Answer:
    chosen = _choose(found, lambda each: each.problems)
    if chosen is None:
        raise CheckpointError("there is no complete checkpoint", where=found[0].path)
    damage = chosen.check(digests=False)
    manifests = list(chosen.manifests.values())
    names = [name for name in sorted({n for m in manifests for n in m.tensors}) if _matches_only(name, args, parser)]
    forms = {name: form for manifest in manifests for name, form in manifest.tensors.items()}
    document = {group: to_plain(manifest) for group, manifest in chosen.manifests.items()}
    first = manifests[0]
    lines = [f"{chosen.path}: step {first.position.step}, {size(sum(each.size for each in manifests))}"]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    for title, text in {
        "written": f"{first.time} by {', '.join(first.workers)}",
        "run": f"{first.run}{f', seed {first.seed}' if first.seed is not None else ''}",
        "position": _describe_position(first) or f"step {first.position.step} of {first.position.program!r}",
        **{f"plan of {name}": f"{each}; program {each.program_digest[:12]}" for name, each in first.plans.items()},
        "last results": ", ".join(f"{name} {value:.6g}" for name, value in first.position.logs.items()),
        "versions": versions,
        "damaged": "; ".join(damage),
    }.items():
        if text:
            lines.append(f"  {title}: {escape_foreign_text(text)}")
    lines.append(f"  {len(names)} tensors, {sum(prod(forms[name].shape) for name in names):,} numbers")
    for name in names:
        pieces = sum(len(part.slices.get(name, ())) for manifest in manifests for part in manifest.parts)
        several = f"  in {pieces} slices" if pieces > 1 else ""
        lines.append(f"    {escape_foreign_text(name)}  {forms[name].dtype}{list(forms[name].shape)}{several}")
    return {"folder": chosen.path, "manifests": document}, "\n".join(lines)


def _choose(
    found: list[FoundCheckpoint], find_faults: Callable[[FoundCheckpoint], Sequence[str]]
) -> FoundCheckpoint | None:
    """The newest complete checkpoint without such faults; skipped ones are reported on stderr, with their first fault.
    None if there is none.
    """
    skipped: list[str] = []
    for each in found:
        faults = find_faults(each) if each.is_committed else each.check(digests=False)
        if not faults:
            for line in skipped:
                print(line, file=sys.stderr)
            return each
        skipped.append(f"skipping {each.path}: {faults[0]}")
    return None


def _matches_only(name: str, args: argparse.Namespace, parser: Parser) -> bool:
    try:
        return args.only is None or re.fullmatch(args.only, name) is not None
    except re.error as error:
        parser.error(f"--only {args.only}: {error}")


def _verify(found: list[FoundCheckpoint], args: argparse.Namespace, parser: Parser) -> int:
    problems = {each.path: each.check() for each in found}
    complete = not any(problems.values())
    if args.json:
        checkpoints = {path: list(each) for path, each in problems.items()}
        print(json.dumps({"ok": complete, "checkpoints": checkpoints}, indent=1))
    else:
        for path, each in problems.items():
            print(f"{path}: {each[0] if each else 'complete'}")
    return arguments.DONE if complete else arguments.FAILED


def _prune(found: list[FoundCheckpoint], args: argparse.Namespace, parser: Parser) -> Answer:
    if args.keep is None or not args.keep.isdecimal() or int(args.keep) < 1:
        parser.error("--keep needs a number of at least 1: --keep 3")
    if found[0].path == args.folder:
        raise CheckpointError("the folder is a single checkpoint, not the folder of a run", where=args.folder)
    folder = Folder(args.folder)
    folder.lock()
    gone = folder.prune(int(args.keep), digests=True)
    folder.unlock()
    removed = ", ".join(f"step {step}" for step in gone) or "nothing"
    return {"removed": gone}, f"removed: {removed}"


def _export(found: list[FoundCheckpoint], args: argparse.Namespace, parser: Parser) -> int | Answer:
    if args.to is None or not args.to.endswith((".npz", ".safetensors")):
        parser.error("--to needs a file name: --to weights.npz, or --to weights.safetensors")
    chosen = _choose(found, FoundCheckpoint.check)
    if chosen is None:
        raise CheckpointError("there is no complete checkpoint", where=found[0].path)
    from whale_nebula.runtime.checkpoint.slices import Source

    source = Source(chosen, next(iter(chosen.manifests.values())).identity)
    arrays = dict(_read(source, args, parser))
    if not arrays:
        what, mend = f"no tensor matches {args.only}", "pass a regular expression for full names: --only 'dense.*'"
        failure = CheckpointError(what, where=chosen.path, mend=mend)
        return print_error(failure, as_json=args.json, code=arguments.FAILED)
    try:
        _write_npz(arrays, args.to) if args.to.endswith(".npz") else _write_safetensors(arrays, args.to)
    except Exception as error:  # safetensors raises its own errors
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        failure = CheckpointError("cannot write the tensors", where=args.to, why=why, mend="--to another/file")
        return print_error(failure, as_json=args.json, code=arguments.FAILED)
    document = {"file": args.to, "tensors": len(arrays), "step": chosen.step}
    return document, f"{args.to}: {len(arrays)} tensors of {chosen.path}"


def _read(source: Any, args: argparse.Namespace, parser: Parser) -> Iterator[tuple[str, Any]]:
    for name in sorted(source.tensors):
        if not name.startswith(STATES) and _matches_only(name, args, parser):
            yield name, source.read(name).numpy()


_COMMANDS: Mapping[str, Callable[[list[FoundCheckpoint], argparse.Namespace, Parser], int | Answer]] = {
    "list": _list, "show": _show, "verify": _verify, "prune": _prune, "export": _export,
}  # fmt: skip


def _write_npz(arrays: Mapping[str, Any], path: str) -> None:
    """Write NumPy's format, which lacks short floats (bfloat16, float8): they become float32, without loss."""
    import zipfile

    import numpy as np

    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array.astype("float32") if array.dtype.kind == "V" else array)


def _write_safetensors(arrays: Mapping[str, Any], path: str) -> None:
    import numpy as np

    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise OSError("safetensors is not installed: pip install safetensors, or --to weights.npz") from error
    save_file({name: np.asarray(array) for name, array in arrays.items()}, path)
