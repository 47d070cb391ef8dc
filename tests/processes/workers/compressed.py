"""Worker: train a small step once for each codec that is named, "int8" or "int8,2,gpipe"; tell what each left."""

import sys
from typing import Any

from tests.parity.crossing import CODECS, crossed
from tests.processes.telling import bits, sent, tell

STEPS = {"ramp": 12}


def main(*cases: str) -> None:
    for case in cases:
        name, *how = case.split(",")
        options: dict[str, Any] = {"micro_batches": int(how[0]), "schedule": how[1]} if how else {}
        left = crossed(CODECS[name], steps=STEPS.get(name, 3), **options)
        tell(case, {"losses": [loss.hex() for loss in left.losses], "weights": bits(left.weights)})
        tell(f"{case} sent", sent())


if __name__ == "__main__":
    main(*sys.argv[1:])
