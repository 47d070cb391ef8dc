"""Training with synchronous steps for all rows: the reference of the sites."""

from __future__ import annotations

import argparse
import json

import task


def main() -> None:
    """Train, and print a line of JSON."""
    asked = task.add_options(argparse.ArgumentParser(description=__doc__)).parse_args()
    model = task.make_model(asked.seed, asked.rate)
    held = task.Teacher(7).draw_rows(task.HELD_OUT_ROWS)
    model.fit(task.make_batches(asked.seed, asked.steps), verbose=0)
    print(json.dumps({"seed": asked.seed, "loss": model.evaluate(*held, batch_size=256, verbose=0)}), flush=True)


if __name__ == "__main__":
    main()
