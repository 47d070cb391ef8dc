"""Real processes under every fault: runs that must continue do so to the same bits, others stop with an error.

    python benchmarks/faults/run.py --list               # the cases
    python benchmarks/faults/run.py --only kill          # those whose names hold a text
    python benchmarks/faults/run.py --minutes 30         # all, and then random faults for so long

Each case is a run of two clusters over mutual TLS. result.json is written after each, so that it can be interrupted; a
repeated case replaces its row. Faults of the line use tools/wan.py (root).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import describe_machine, write
from fault_run import RunningTrial, RunResult, run_on_this_host, run_over_emulated_line
from flood import HANDSHAKES_BAR, REFUSAL_BAR, SLOWER_BAR, flood

from whale_nebula.faults import POINTS

STEPS, PAUSE = 30, 0.2
NOTICE_BAR = 2.0
FRAME_FAULTS = ("corrupt", "truncate", "duplicate", "reorder", "replay")
RESULT = Path(__file__).with_name("result.json")


class Case(NamedTuple):
    """A fault: its name, whether a run must continue with it, and how it is run."""

    name: str
    must_complete: bool | None  # None: it may end either way
    run: Callable[[], RunResult]
    wide: int = 1
    steps: int = STEPS
    notice: float = NOTICE_BAR


def row(case: Case) -> dict[str, Any]:
    """Run a case and evaluate it."""
    started = time.monotonic()
    try:
        ended = case.run()
    except AssertionError as error:
        return {"what": case.name, "as_it_must": False, "ends": "lost", "detail": remove_paths(str(error)[-500:])}
    wrong = find_violations(case, ended)
    ends = "hangs" if ended.hangs else "goes on" if ended.completed else "stops"
    return {
        "what": case.name,
        "ends": ends,
        "as_it_must": not wrong,
        "seconds": round(time.monotonic() - started, 1),
        "notice_s": ended.notice,
        "detail": remove_paths("; ".join(wrong)) or detail(ended),
    }


def detail(ended: RunResult) -> str:
    """A description of a run that ended as required."""
    if ended.completed:
        connections = max((about.get("connections", 0) for about in ended.told.values()), default=0)
        struck = sum(about.get("struck", 0) for about in ended.told.values())
        hurt = f", {struck} frames hurt" if struck else ""
        return f"the same weights, bit for bit; {connections} connection{'s' * (connections != 1)}{hurt}"
    first = {cluster: remove_paths(text.splitlines()[0])[:150] for cluster, text in ended.errors.items()}
    first |= {cluster: "the same weights, bit for bit" for cluster, code in ended.codes.items() if code == 0}
    return "; ".join(f"{cluster}: {text}" for cluster, text in first.items())


def remove_paths(text: str) -> str:
    """Remove this machine's paths from a text."""
    return re.sub(r"(?<!\w)/\S*/", "", text)


def find_violations(case: Case, ended: RunResult) -> list[str]:
    """The violations of the expectations of a case."""
    wrong = [f"left: {each}" for each in ended.orphans]
    if ended.hangs:
        tails = {cluster: text[-300:] for cluster, text in ended.said.items()}
        return [*wrong, f"does not end: {ended.codes} {tails}"]
    if case.must_complete is not None and ended.completed != case.must_complete:
        wrong.append(f"{'goes on' if ended.completed else 'stops'}: {ended.codes} {ended.errors or ended.said}"[:800])
    for cluster, about in ended.told.items():
        if "weights" in about and (about["weights"], about["loss"]) != run_undisturbed(case.steps, case.wide):
            wrong.append(f"{cluster} has come to other weights")
    for cluster, text in ended.errors.items():
        other = {"gpu": "npu/0", "npu": "gpu/0"}[cluster]
        if other not in text and "failpoint" not in text:
            wrong.append(f"{cluster} stops without a name: {text[:200]}")
    silent = [c for c, code in ended.codes.items() if code not in (0, 137) and c not in ended.errors]
    wrong += [f"{cluster} ended with {ended.codes[cluster]} and said nothing of it" for cluster in silent]
    if case.must_complete is False and "kill" in case.name and (ended.notice or 0.0) > case.notice:
        wrong.append(f"noticed after {ended.notice} s")
    return wrong


@cache
def run_undisturbed(steps: int, wide: int) -> tuple[Any, Any]:
    """The results of a run without faults."""
    ended = run_on_this_host(steps, "--wide", wide)
    if not ended.completed:
        raise SystemExit(f"the undisturbed run fails: {ended.said}")
    about = ended.told["npu"]
    return about["weights"], about["loss"]


# The cases.

_ONCE = ("hello.", "agree.", "meet.", "link.", "connection.", "frames.", "failure.", "certificate.")
_TRIGGERS = {
    "connection.down": "chunk.first.after=drop@3",
    "frames.again": "chunk.first.after=drop@3",
    "failure.telling": "update.before=raise@3",
}
_WIDE, _WIDE_STEPS = 2560, 8
# A worker that dies before it has connected cannot be told from one not started yet: others wait with patience.
_UNCONNECTED_PATIENCE = 15
# After the work, or before its begin, a death need not stop the other worker by an error.
_LATE = ("link.", "meet.")


def kills() -> Iterator[Case]:
    """kill -9 at every failpoint, on one worker and then the other."""
    for number, point in enumerate(POINTS):
        worker = ("gpu/0", "npu/0")[number % 2]
        hit = 1 if point.startswith(_ONCE) else 3
        faults = [f"{worker}:{point}=kill@{hit}"]
        faults += [f"{worker}:{_TRIGGERS[point]}"] if point in _TRIGGERS else []
        meanwhile = _renew_certificates if point.startswith("certificate.") else None
        pause = 0.3 if meanwhile else 0.0
        steps = STEPS if meanwhile else _WIDE_STEPS
        wide = _WIDE if point.startswith("chunk.middle") else 1
        patience = _UNCONNECTED_PATIENCE if point == "hello.before" else 60
        ended = partial(
            run_on_this_host,
            *(steps, "--wide", wide, "--pause", pause),
            faults=",".join(faults),
            meanwhile=meanwhile,
            patience=f"{patience}s",
        )
        must_complete = None if point.startswith(_LATE) else False
        notice = _UNCONNECTED_PATIENCE + NOTICE_BAR if point == "hello.before" else NOTICE_BAR
        yield Case(f"kill {worker} at {point}", must_complete, ended, wide, steps, notice)


def _renew_certificates(course: RunningTrial) -> None:
    course.await_step(3)
    with contextlib.redirect_stdout(None):
        course.found.certs("renew")


def failpoints() -> Iterator[Case]:
    """Other actions at failpoints."""
    for point in ("chunk.first.before", "chunk.middle.after", "chunk.last.after", "tensor.received", "message.received",
                  "connection.opened"):  # fmt: skip
        again = "" if point.startswith("connection.") else "+"
        hit = 2 if again else 1
        drop = f"gpu/0:{point}=drop@{hit}" if not again else ",".join(f"gpu/0:{point}=drop@{n}" for n in (3, 6, 9))
        ended = partial(run_on_this_host, _WIDE_STEPS, "--wide", _WIDE, faults=drop)
        yield Case(f"drop the connection at {point}", True, ended, _WIDE, _WIDE_STEPS)
    for point in ("step.announced", "update.before"):
        ended = partial(run_on_this_host, STEPS, faults=f"gpu/0:{point}=raise@5")
        yield Case(f"an error at {point}", False, ended)
    ended = partial(run_on_this_host, STEPS, faults="npu/0:chunk.last.before=delay:3@9")
    yield Case("3 s of delay before a chunk", True, ended)
    ended = partial(run_on_this_host, STEPS, faults="npu/0:update.begun=freeze@5")
    yield Case("freeze at update.begun", False, ended)


def cuts() -> Iterator[Case]:
    """Interruptions of the line, and connections that break repeatedly."""
    for seconds in (1, 5, 30):
        ended = partial(_line, f"--cut 1s+{seconds}s")
        yield Case(f"a cut of {seconds} s", True, ended)
    yield Case("a one-way blackhole of 6 s", True, partial(_line, "--cut 1s+6s@0:1"))
    yield Case(
        "a one-way blackhole beyond a patience of 12 s", False, partial(_line, "--cut 1s+90s@0:1", patience="12s")
    )
    ended = partial(run_on_this_host, 60, "--pause", PAUSE, meanwhile=_reset, line=True)
    yield Case("resets every 2 s", True, ended, steps=60)


def _reset(course: RunningTrial) -> None:
    course.await_step(2)
    while not course.over and course.line is not None:
        course.line.reset()
        time.sleep(2.0)


def _line(options: str, *, wide: int = 1, patience: str = "60s") -> RunResult:
    wan = f"--rate 60mbit --delay 5ms {options}"
    return run_over_emulated_line(STEPS, "--wide", wide, "--pause", PAUSE, wan=wan, after=2, patience=patience)


def lines() -> Iterator[Case]:
    """A line that loses packets, and one that becomes slow."""
    for percent in (1, 3, 5):
        yield Case(f"{percent} % of the packets lost", True, partial(_line, f"--loss {percent}%", wide=64), wide=64)
    changes = "--change 2s=6mbit --change 8s=60mbit"
    yield Case("60, 6, 60 Mbit/s", True, partial(_line, changes, wide=256), wide=256)


def frames() -> Iterator[Case]:
    """Frames that are damaged, repeated or reordered, one in nine."""
    for ill in FRAME_FAULTS:
        ended = partial(run_on_this_host, STEPS, "--ill", ill, "--every", 9)
        yield Case(f"frames: {ill}", True, ended)


def list_flood_cases() -> Iterator[Case]:
    """Strangers' connections to the port."""

    def run() -> RunResult:
        seen: dict[str, Any] = {}
        ended = run_on_this_host(4000, "--pause", 0.01, meanwhile=lambda course: _flood(course, seen))
        ended.told["gpu"] = {**ended.told.get("gpu", {}), "flood": seen}
        return ended

    yield Case("a flood of 50 strangers a second", None, run, steps=4000)


def _flood(course: RunningTrial, seen: dict[str, Any]) -> None:
    flood(course, seen)
    print(json.dumps(seen), flush=True)
    FLOOD.update(seen)
    for site in course.found.sites.values():
        site.process.terminate()  # the measurement is complete


FLOOD: dict[str, Any] = {}


def list_cases() -> list[Case]:
    """All cases but the random ones."""
    return [*cuts(), *lines(), *frames(), *failpoints(), *list_flood_cases(), *kills()]


def random_case(seed: int) -> Case:
    """Several faults at once, drawn by the seed."""
    draw = random.Random(seed)
    faults, deadly = [], False
    for _ in range(draw.randint(1, 3)):
        point = draw.choice([name for name in POINTS if not name.startswith(_ONCE)])
        actions = ["delay:0.5", "delay:2", *(["drop"] * 3 if POINTS[point].connection else []), "kill"]
        action = draw.choice(actions)
        deadly |= action == "kill"
        faults.append(f"{draw.choice(('gpu/0', 'npu/0'))}:{point}={action}@{draw.randint(1, STEPS)}")
    ill = draw.choice(("", "", *FRAME_FAULTS))
    arguments = ["--ill", ill, "--every", draw.randint(7, 30)] if ill else []
    resets = draw.random() < 0.5

    def meanwhile(course: RunningTrial) -> None:
        if resets and course.line is not None:
            course.await_step(2)
            for _ in range(draw.randint(1, 4)):
                course.line.reset()
                time.sleep(draw.random())

    ended = partial(run_on_this_host, STEPS, *arguments, faults=",".join(faults), meanwhile=meanwhile, line=True)
    what = f"random {seed}: {', '.join(faults)}{', ' + ill if ill else ''}{', resets' if resets else ''}"
    return Case(what, None if deadly else True, ended)


# What is kept.


def save_row(rows: list[dict[str, Any]], found: dict[str, Any], about: dict[str, Any]) -> None:
    """Add a row to the result, replacing an older one of the same name."""
    rows[:] = [each for each in rows if each["what"] != found["what"]]
    rows.append(found)
    good = sum(each["as_it_must"] for each in rows)
    result = {"machine": about, "cases": len(rows), "as_they_must": good, "rows": rows}
    with contextlib.redirect_stdout(None):
        write(__file__, result, table(rows))


def table(rows: list[dict[str, Any]]) -> list[list[object]]:
    """The rows of the README's table, with the random cases as one."""
    told: list[list[object]] = [["what", "ends", "as it must", "noticed after", "seconds", ""]]
    random_rows = [each for each in rows if each["what"].startswith("random")]
    for each in rows:
        if each not in random_rows:
            notice = "" if each.get("notice_s") is None else f"{each['notice_s']} s"
            must = "yes" if each["as_it_must"] else "**no**"
            text = each["detail"].replace("|", "/").replace("\n", " ")[:200]
            told.append([each["what"], each["ends"], must, notice, each.get("seconds", ""), text])
    if random_rows:
        good = sum(each["as_it_must"] for each in random_rows)
        seconds = round(sum(each.get("seconds", 0.0) for each in random_rows))
        stops = sum(each["ends"] == "stops" for each in random_rows)
        told.append(
            [f"{len(random_rows)} random cases", f"{stops} stop", f"{good} of {len(random_rows)}", "", seconds, ""]
        )
    return told


def main() -> int:
    """Run the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cases whose names hold this text; no random ones")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--minutes", type=float, default=30.0, help="of random faults")
    parser.add_argument("--seed", type=int, default=1, help="of the first random case")
    parser.add_argument("--quick", action="store_true", help="one case; writes nothing")
    parser.add_argument("--missing", action="store_true", help="only those that the result has not, or not well")
    given = parser.parse_args()
    cases = [case for case in list_cases() if (given.only or "") in case.name]
    if given.list:
        print("\n".join(case.name for case in cases))
        return 0
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    about = describe_machine()
    if given.quick:
        cases = [case for case in cases if case.name == "frames: corrupt"] or cases[:1]
    if given.missing:
        well = {each["what"] for each in rows if each["as_it_must"]}
        cases = [case for case in cases if case.name not in well]
    bad = 0
    for case in chain(cases, () if given.only or given.quick else draw_cases(given.seed, 60.0 * given.minutes)):
        found = row(case)
        if case.name.startswith("a flood"):
            found = evaluate_flood(found)
        bad += not found["as_it_must"]
        print(json.dumps(found), flush=True)
        if not given.quick:
            save_row(rows, found, about)
    return bool(bad)


def draw_cases(seed: int, seconds: float) -> Iterator[Case]:
    """Random cases for this number of seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield random_case(seed)
        seed += 1


def evaluate_flood(found: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the flood by its numbers."""
    bars = {"slower": SLOWER_BAR, "cpu_s_a_refusal": REFUSAL_BAR, "handshakes_open": HANDSHAKES_BAR}
    missed = [f"{name} {FLOOD.get(name)} > {bar}" for name, bar in bars.items() if FLOOD.get(name, 1e9) > bar]
    detail = "; ".join(missed) or json.dumps(FLOOD)
    return {**found, "ends": "goes on", "as_it_must": not missed, "detail": detail, **FLOOD}


if __name__ == "__main__":
    sys.exit(main())
