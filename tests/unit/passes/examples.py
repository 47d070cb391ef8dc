"""Common steps of tests of the passes, with small shapes; gradients only have the form of gradients."""

from pathlib import Path

_TEXTS: dict[str, str] = {}
for _section in Path(__file__).with_suffix(".txt").read_text("utf-8").split("== ")[1:]:
    _title, _, _text = _section.partition("\n")
    _name, _, _base = _title.removesuffix(" +").partition(" = ")
    _TEXTS[_name] = _TEXTS.get(_base, "") + _text.rstrip("\n") + "\n"

TWO_DENSE = _TEXTS["TWO_DENSE"]
DENSE_TANH = _TEXTS["DENSE_TANH"]
TWO_STAGES = _TEXTS["TWO_STAGES"]
DESCENT = _TEXTS["DESCENT"]
GLOBAL_NORM = _TEXTS["GLOBAL_NORM"]
SKIP = _TEXTS["SKIP"]
TIED = _TEXTS["TIED"]
FROZEN = _TEXTS["FROZEN"]
TWO_PHASES = _TEXTS["TWO_PHASES"]
PENALTY = _TEXTS["PENALTY"]
ONCE = _TEXTS["ONCE"]
CUT_BATCH = _TEXTS["CUT_BATCH"]

EXAMPLES = {
    "two_stages": TWO_STAGES + DESCENT,
    "global_norm": TWO_STAGES + GLOBAL_NORM,
    "skip": SKIP,
    "tied": TIED,
    "frozen": FROZEN,
    "two_phases": TWO_PHASES,
    "penalty": PENALTY,
    "once": ONCE,
    "cut_batch": CUT_BATCH,
}
