"""The longer examples with one line in the place of their scopes: `nb.auto_parallel` cuts them into two clusters,
neither of which has memory for the model, and they train the numbers of one device.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.examples import test_short_examples
from tests.processes import zygote

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE = 900


class PlannedExample(NamedTuple):
    """An example: its options, the lines of scopes with what replaces them, and patterns of the number that it ends
    with, and of what it prints if something crosses. In the lines, AUTO is `nb.auto_parallel(...)`, and INIT a run of
    two clusters. `memory` of a worker has no room for the model. `launch` are options of the launcher: clusters, or a
    config that says which inputs only one cluster has.
    """

    name: str
    options: Sequence[str]
    memory: str
    lines: Sequence[tuple[str, str]]
    number_pattern: str
    crossing_pattern: str
    launch: Sequence[str] = ("--clusters", "gpu,npu")
    tolerance: float = 2e-3

    def write(self, folder: Path, memory: str | None, is_launched: bool) -> Path:
        """The example without its scopes, in a folder that has what it needs."""
        init = "nb.init(seed=1)" if is_launched else "nb.init({'clusters': {'gpu': {}, 'npu': {}}}, seed=1)"
        texts = {"INIT": init, "AUTO": f"nb.auto_parallel(memory={memory!r}, micro_batch=1)"}
        for each in EXAMPLES.glob("*.*"):
            shutil.copy(each, folder)
        source = (EXAMPLES / f"{self.name}.py").read_text()
        for old, new in self.lines:
            assert source.count(old) == 1, old
            source = source.replace(old, re.sub("INIT|AUTO", lambda found: texts[found[0]], new))
        path = folder / f"{self.name}.py"
        path.write_text(source)
        return path


PLANNED_EXAMPLES = [
    PlannedExample(
        "recommend",
        ["--rows", "5000", "--batch", "250", "--epochs", "1"],
        "950KiB",
        [
            ("        model, tables = make_model", "        AUTO\n        model, tables = make_model"),
            ("    places: dict[str, Any] = ", "    # "),
            ("    nb.place(model, ", "    # "),
            ('    with nb.pipeline(given.micro_batch, coupled="allow"):', "    if model:"),
        ],
        r"held-out rows: (\d\.\d+)",
        r"(?m)│ +[1-9]\d* +│$",
        ("--clusters", "cpu,gpu"),
    ),
    PlannedExample(
        "one_bit",
        ["--steps", "12", "--warm-up", "6"],
        "28MiB",
        [
            (
                '    with nb.cluster(), nb.replica(exchange="1bit"), nb.stage():\n        model',
                "    AUTO\n    if True:\n        model",
            )
        ],
        r"held-out rows: (\d\.\d+)",
        r"(?m)│ +[1-9]\d* +│$",
    ),
    PlannedExample(
        "understand",
        ["--codecs", "none", "--rows", "128", "--test", "64", "--epochs", "1", "--pretrain", "10"],
        "15MiB",
        [
            ("    cut(bert, model, options, codec)\n", ""),
            ("    model = understanding(bert, task)\n", "    AUTO\n    model = understanding(bert, task)\n"),
        ],
        r"loss \d\.\d+ -> (\d\.\d+)\n.*rank",
        r"none +│[^│]+│ +[1-9]",
        ("--config", "understand.yaml"),
    ),
    PlannedExample(
        "pretrain",
        ["--steps", "6", "--tune", "10", "--test", "20"],
        "29MiB",
        [
            ("tape, nb.cluster(), nb.compress(fp16=True):", "tape:"),
            ("    @nb.function\n", "    AUTO\n\n    @nb.function\n"),
            (", around=lambda name: around(name, options))", ")"),
            # a cut may divide the discriminator, which one process reads after the run
            ("    if not kept:\n", "    if not alone or not kept:\n"),
        ],
        r"step 6, .*corrected (\d\.\d+)",
        "bits per token were sent",
        ("--config", "pretrain.yaml"),
    ),
    PlannedExample(
        "translate",
        ["--codecs", "none", "--pairs", "800", "--pretrain", "20", "--steps", "20"],
        "23MiB",
        [
            ("    with nb.cluster(), compressed:\n        source", "    AUTO\n    with compressed:\n        source"),
            (", around=lambda side: nb.stage(cluster=side))", ")"),
            # as layers of either language model may go to either cluster, both have all text and both models
            ("[side for side in SIDES if nb.here().runs(side)]", "list(SIDES)"),
            # a decoding loop is one op, which cannot read variables of several processes
            (
                'found = translate_pairs(model, tests, sides["target"].words)',
                'found = translate_pairs(model, tests, sides["target"].words) if alone else None',
            ),
        ],
        r"│ (\d\.\d+) │ +[\d.]* *│",
        r"none +│[^│]+│[^│]+│ +[1-9]",
        ("--clusters", "source,target"),
        tolerance=3e-2,  # its language models are pretrained anew: 4.32 in one process, 4.39 in two
    ),
    PlannedExample(
        "survive",
        [],
        "104KiB",
        [
            ("    nb.init(seed=1, checkpoint", "    INIT\n    AUTO\n    # "),
            ("    with nb.cluster(), nb.pipeline(micro_batch=4):\n", "    if True:\n"),
            ('        with nb.stage(cluster="gpu"):\n', "        if True:\n"),
            ('        with nb.stage(cluster="npu"):\n', "        if True:\n"),
            ('[:16]}")\n', '[:16]}", *nb.last_report().links)\n'),
        ],
        r"loss (\d\.\d+)",
        "->",
    ),
    PlannedExample(
        "two_processes",
        [],
        "42KiB",
        [
            ("    inputs = keras.Input((16,))\n", "    INIT\n    AUTO\n    inputs = keras.Input((16,))\n"),
            ("    with nb.cluster(), nb.pipeline(micro_batch=4):\n", "    if True:\n"),
            ('        with nb.stage(cluster="gpu"):\n', "        if True:\n"),
            ('        with nb.stage(cluster="npu"):\n', "        if True:\n"),
            ("    start() if attach() is None else train()", "    train()"),
        ],
        r"loss (\d\.\d+)",
        r"sent in the last step, .*: [1-9]",
    ),
    PlannedExample(
        "demo",
        [],
        "28MiB",
        [
            ("heads=4, blocks=4", "heads=4, blocks=2"),
            ("MICRO_BATCHES, EPOCHS = 1024, 64, 4, 8", "MICRO_BATCHES, EPOCHS = 128, 64, 4, 2"),
            ("    nb.init(links=LINE)\n", "    INIT\n    AUTO\n"),
            ("        with nb.cluster(), nb.pipeline(micro_batch=MICRO_BATCHES):\n    ", ""),
            (', around=lambda block: nb.stage(cluster="gpu" if block < 2 else "npu"))', ")"),
            ("uncut = train(language_model(cut=False))", "uncut = across"),
        ],
        r"loss across two clusters (\d\.\d+)",
        r"carries [1-9]",
    ),
    PlannedExample(
        "curriculum",
        ["--start", "16", "--end", "32", "--grow", "3", "--steps", "5"],
        "6900KiB",
        [
            ("heads=4, blocks=4", "heads=4, blocks=2"),
            ("    nb.init(seed=1, links=LINE if attach() is None else None)\n", "    INIT\n    AUTO\n"),
            ("    with nb.cluster(), nb.pipeline(micro_batch=MICRO_BATCHES):\n    ", ""),
            (', around=lambda block: nb.stage(cluster="gpu" if block < 2 else "npu"), shorter', ", shorter"),
        ],
        r"held back: (\d\.\d+)",
        r"│ +[1-9]\d* +│ +1 +│",
    ),
    PlannedExample(
        "place",
        [],
        "7MiB",
        [
            ("ROWS, BATCH, SIDE = 128, 32, 32", "ROWS, BATCH, SIDE = 64, 32, 32"),
            ("    nb.init(links=LINE)\n    model", "    INIT\n    AUTO\n    model"),
            ('    nb.place(model, {"conv1.*', '    # {"conv1.*'),
            ("loss {loss:.4f}", "loss {loss:.6f}"),
            ("    # With a pinned plan", "    return 0\n    # With a pinned plan"),
        ],
        r"loss (\d\.\d+)",
        r": [1-9]\d* kB per step",
    ),
    PlannedExample(
        "large_classifier",
        [],
        "15130KiB",
        [
            ("nb.init(seed=1)\n", "INIT\nAUTO\n"),
            ('with nb.cluster(["gpu"]):\n    with nb.replica(2):\n        features', "features"),
            ("    with nb.split(2):\n        logits", "logits"),
            ("epochs=6", "epochs=1"),
        ],
        r"loss (\d\.\d+)",
        "npu +npu ",
    ),
]


def run_example(example: PlannedExample, folder: Path, memory: str | None, *before: str) -> tuple[float, bool]:
    """The number that it ends with, in each process that prints it, and whether anything crossed."""
    folder.mkdir()
    script = example.write(folder, memory, bool(before))
    result = zygote.run(*before, str(script), *example.options, cwd=folder, timeout=DEADLINE, env={"COLUMNS": "100"})
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    (found,) = set(re.findall(example.number_pattern, result.stdout))
    return float(found), re.search(example.crossing_pattern, result.stdout) is not None


@pytest.mark.grid
@pytest.mark.timeout(4 * DEADLINE)
@pytest.mark.parametrize("example", PLANNED_EXAMPLES, ids=lambda example: example.name)
def test_planned_example_trains_like_one_device(tmp_path: Path, example: PlannedExample) -> None:
    uncut, crossed = run_example(example, tmp_path / "uncut", None)
    assert not crossed
    launch = ("-m", "whale_nebula", "run", "--all", *example.launch)
    for name, before in {"one process": (), "two processes": launch}.items():
        cut, crossed = run_example(example, tmp_path / name, example.memory, *before)
        assert crossed and cut == pytest.approx(uncut, rel=example.tolerance)


def test_all_examples_with_scopes_are_tested_without_them() -> None:
    scoped = {path.stem for path in EXAMPLES.glob("*.py") if re.search(r"nb\.(cluster|place)\(", path.read_text())}
    assert scoped == {*test_short_examples.EXAMPLES, *(example.name for example in PLANNED_EXAMPLES)}
