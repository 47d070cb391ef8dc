"""Every script of the book with every cut that is natural for it, as a table; by hand, for it takes minutes.

python -m tests.scripts.loops.grid [word of a name ...]
"""

from __future__ import annotations

import sys
import warnings

import whale_nebula as nb
from tests.scripts.loops.book import Cut, Left, Script, assert_same, opened, run


def result(script: Script, plain: Left, cut: Cut) -> str:
    """'ok', 'wrong', or the error."""
    nb.shutdown()
    try:
        found = run(script.build, cut)
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
    try:
        assert_same(plain, found)
    except AssertionError as difference:
        return f"wrong {str(difference).splitlines()[0]}"
    return "ok" if found.stages == cut.stages * script.passes else f"{found.stages} stages"


def main(words: list[str]) -> None:
    """Print a line for each script: what did not go well, or ok."""
    warnings.simplefilter("ignore")
    for name, script in opened().items():
        if not words or any(word in name for word in words):
            plain = run(script.build, Cut(0))
            cuts = [Cut(stages, micro) for stages in script.stages for micro in script.micro]
            found = {f"{cut.stages} × {cut.micro_batches}": result(script, plain, cut) for cut in cuts}
            bad = "; ".join(f"{cut} {said}" for cut, said in found.items() if said != "ok")
            print(f"{name:45s} {bad or 'ok'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
