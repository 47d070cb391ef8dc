"""`whale-nebula audit`: check that an audit log is unchanged (`verify`), or list the accesses in it (`report`). Needs
no TensorFlow.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from whale_nebula.cli import arguments, audit_report
from whale_nebula.cli.arguments import Options, Parser, print_error, split
from whale_nebula.errors import AuditError, NebulaError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import files
from whale_nebula.security.audit import Head, read_heads
from whale_nebula.security.trust import Revocations, Trust, load
from whale_nebula.security.verdict import Verdict, verify

_DESCRIPTION = """\
Verify an audit log: follow its chain of digests from the first record, across rotated files. With --heads, a peer's
file of signed heads of this log, truncation and rewriting are also detected. With --ca, only heads signed by a
certificate of this authority count, and enough of them are required; heads signed by a revoked certificate do not
count (the deny list is expected next to --ca).

"whale-nebula audit report" reports who read which data of an owner: see its --help."""

_EPILOG = """\
examples:
  whale-nebula audit verify audit/gpu-gateway.jsonl
  whale-nebula audit verify audit/gpu-gateway.jsonl --heads from-npu/npu-gateway.heads.jsonl --ca certs/ca.pem
  whale-nebula audit verify audit/gpu-gateway.jsonl --json

The gateway of cluster gpu writes audit/gpu-gateway.jsonl; that of npu keeps its heads, in npu-gateway.heads.jsonl.

exit status:
  0   the log is unchanged
  1   a record is wrong or missing (the first one is named), or the log does not match the heads
  2   wrong command line
  65  the heads or the authority's certificate cannot be read
  66  the file does not exist"""


_OPTIONS: Options = {
    "--heads": ("FILE", "heads of this log that a peer has kept"),
    "--ca": ("FILE", "the authority's certificate"),
    "--revoked": ("FILE", "the deny list; default: next to --ca"),
    "--json": (None, "print one JSON object"),
}


def make_parser() -> Parser:
    """The options of the command."""
    usage = "whale-nebula audit verify FILE [--heads FILE] [--ca FILE [--revoked FILE]] [--json]"
    return Parser("audit", _DESCRIPTION, _OPTIONS, usage=usage, epilog=_EPILOG)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    if argv[:1] == ["report"]:
        return audit_report.main(argv[1:])
    parser = make_parser()
    words = split(argv, _OPTIONS)
    args = parser.read([*words.options, *(word for word in words.arguments if word.startswith("-"))])
    if words.script != "verify" or len(words.arguments) != 1:
        parser.error("whale-nebula audit verify FILE, or whale-nebula audit report")
    path = words.arguments[0]
    if args.revoked is not None and args.ca is None:
        parser.error("--revoked needs --ca: the authority signs the deny list")
    for each in (path, args.heads, args.ca, args.revoked):
        if each is not None and not os.path.isfile(each):
            error = AuditError(f"file {each!r} does not exist", mend="whale-nebula audit verify FILE")
            return print_error(error, as_json=args.json, code=arguments.NO_FILE)
    try:
        trust: Trust | None = None
        revoked: Revocations = {}
        if args.ca is not None:
            trust = Trust(files.certificates(files.read(args.ca, "the authority's certificate"), args.ca))
            revoked = _load_revoked(args, trust)
        verdict = verify(path, _read_heads(args.heads), trust, revoked)
    except NebulaError as error:
        return print_error(error, as_json=args.json, code=arguments.NO_DATA)
    print(json.dumps({"ok": verdict.ok, **asdict(verdict)}, indent=1) if args.json else _format_text(verdict, args))
    return arguments.DONE if verdict.ok else arguments.FAILED


def _read_heads(path: str | None) -> list[Head]:
    if path is None:
        return []
    found = list(read_heads(path))
    if not found:
        raise AuditError("the file contains no heads", where=path, mend="--heads FILE: the heads that a peer has kept")
    return found


def _load_revoked(args: argparse.Namespace, trust: Trust) -> Revocations:
    path = Path(args.revoked or Path(args.ca).with_name(files.REVOKED))
    return load(path, trust.authorities).revoked if args.revoked or path.exists() else {}


def _format_text(verdict: Verdict, args: argparse.Namespace) -> str:
    name, why = Path(verdict.path).name, escape_foreign_text(verdict.why)
    if verdict.apart:
        return f"{name} and the given heads or authority do not belong together\n  why: {why}\n  mend: {_PAIR_FIX}"
    if not verdict.ok:
        return f"{name}: record {verdict.bad} is the first invalid one\n  why: {why}"
    lines = [
        f"{name}: {verdict.records} records, all unchanged",
        f"  log of {escape_foreign_text(verdict.site)}, run {escape_foreign_text(verdict.run)}",
    ]
    lines += [f"  {len(verdict.files)} files: {', '.join(verdict.files)}"] * (len(verdict.files) > 1)
    if verdict.torn:
        times, bytes_ = "once" if verdict.torn == 1 else f"{verdict.torn} times", verdict.torn_bytes
        lines.append(f"  a crash cut the last line {times}: {bytes_} bytes were set aside, as the log records")
    if verdict.signed is None:
        lines.append("  none of its heads is signed: anyone who can write the file could have rewritten it")
    else:
        by = "by a certificate of this authority" if args.ca else "by the certificate in the log; verify it with --ca"
        lines.append(f"  {verdict.heads} heads, the last for record {verdict.signed}, signed {by}")
    if verdict.kept is not None:
        lines.append(f"  the peer's heads match up to record {verdict.kept}")
    if not verdict.closed:
        cut = "" if args.heads else "; only a peer's heads can show whether its end was cut off: --heads FILE"
        lines.append(f"  the log was not closed: it is open, or its process crashed{cut}")
    return "\n".join(lines)


_PAIR_FIX = "use files of one run: audit verify gpu-gateway.jsonl --heads npu-gateway.heads.jsonl --ca certs/ca.pem"
