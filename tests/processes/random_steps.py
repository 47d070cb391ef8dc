"""Custom training steps as Python modules, drawn by a seed: forwards, and updates that combine values of all clusters.

Each module has a function `make(nb)`, which returns a step and its variables. With `PLAIN` for `nb`, the step is a
`tf.function` without scopes, to which the cut one is compared.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.errors import NebulaError

STEPS, ROWS, WIDTH = 3, 8, 4

SCALARS = (
    "tf.tanh({s} + {s})", "tf.sin({s} * {s})", "tf.tanh(tf.reduce_sum({v}))", "tf.reduce_max(tf.stack([{s}, {s}]))",
    "tf.tanh(tf.reduce_sum({v} * {v}))", "{s} + 0.", "tf.where({s} > {s}, {s}, {s})", "tf.tanh(tf.norm({v}))",
    "{v}[2]", "{S}.read_value()", "tf.reduce_mean(x)",
    "tf.cond({s} > {s}, lambda: {s} + 0., lambda: tf.tanh(tf.reduce_sum({v})))",
)  # fmt: skip
VECTORS = (
    "tf.tanh({v} + {v})", "{v} * {s}", "tf.sin({v} * {v})", "tf.stack([{s}, {s}, {s}, {s}])", "tf.reverse({v}, [0])",
    "tf.concat([{v}[:2], {v}[2:]], 0)", "tf.where({v} > {s}, {v}, {v})", "tf.clip_by_norm({v}, 1.)",
    "{V}.read_value()", "tf.fill([4], {s})", "tf.reduce_mean(x, 0)",
)  # fmt: skip
STAGES = (
    "tf.tanh({h} * v{c})", "tf.tanh({h} + v{c}) * s{c}", "{h} * v{c} * s{c}", "tf.sin({h} * s{c}) + {h} * v{c}",
)  # fmt: skip
WRITES = ("assign_sub(.05 * {})", "assign_add(.05 * {})", "assign({})")
"""Writes of an expression into a variable. In expressions {s} is a scalar, {v} a vector, {S} and {V} such variables."""


class StepWriter:
    """Writes the module of a step, statement by statement. It has a stage in each cluster, with so many replicas."""

    def __init__(self, clusters: Mapping[str, int], micro_batch: int = 1, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.clusters, self.micro_batch = clusters, micro_batch
        self.kinds: dict[str, str] = {}
        self.lines: list[str] = []
        self.scalars: list[str] = []
        self.vectors: list[str] = []
        self.returned: list[str] = []
        owned = [f"{kind}{cluster}" for cluster in clusters for kind in "sv"]
        self.trained = [*owned, "vt", "sq"]  # vt is tied, sq belongs to no stage
        own = [f"m{cluster}" for cluster in clusters]
        for name in [*self.trained, *own, "m0", "m1", "n0", "n1", "f0", "f1"]:  # metrics m, vectors n, and constants f
            self.kinds[name] = "s" if name[0] in "sm" or name == "f0" else "v"
        self.made: list[str] = []

    def add(self, line: str, depth: int = 0) -> None:
        """Add a line to the step."""
        self.lines.append("    " * depth + line)

    def fill(self, template: str) -> str:
        """An expression with known values or variables in its gaps."""

        def choose(found: re.Match[str]) -> str:
            kind = found[1].lower()
            known = self.scalars if kind == "s" else self.vectors
            variables = [name for name, own in self.kinds.items() if own == kind]
            return self.draw.choice(known if known and found[1] == kind and self.draw.random() < 0.8 else variables)

        return re.sub(r"{([svSV])}", choose, template)

    def forward(self, number: int, factor: str = "") -> None:
        """A forward with a stage for each cluster, and its gradients, which an optimizer or the step applies."""
        self.add(f"with tf.GradientTape() as tape, nb.cluster(), nb.pipeline({self.micro_batch}):")
        self.add("tape.watch(x)", 1)
        if self.draw.random() < 0.2:
            self.add(f"shared{number} = tf.exp(sq)", 1)
            factor += f" * shared{number}"
        if number and self.draw.random() < 0.4:
            factor += f" * {self.draw.choice(self.vectors + self.scalars)}"
        state, tied = "x", self.draw.random() < 0.3
        if number and self.micro_batch == 1 and self.draw.random() < 0.3:
            state = f"(x + .1 * tf.sign(gx{number - 1}))"
        for place, (cluster, replicas) in enumerate(self.clusters.items()):
            copies = f"nb.replica({replicas}), " if replicas > 1 else ""
            self.add(f"with {copies}nb.stage(cluster='{cluster}'):", 1)
            made = self.draw.choice(STAGES).format(h=state, c=cluster)
            frozen = self.draw.choice(["", "", " * f0", " * f1"])
            self.add(f"h{number} = {made}{frozen}{factor}{' * vt' * tied}", 2)
            state = f"h{number}"
            self.extend_stage(state, cluster)
            if place == 0 and self.draw.random() < 0.3:
                self.add(f"aux{number} = tf.reduce_mean({state})", 2)
                self.scalars.append(f"aux{number}")
            if self.micro_batch == 1 and self.draw.random() < 0.15:
                self.add(f"n{place % 2}.assign(.9 * n{place % 2} + .1 * tf.reduce_mean({state}, 0))", 2)
        self.add(f"loss{number} = tf.reduce_mean({state} ** 2)", 2)
        self.scalars.append(f"loss{number}")
        self.differentiate(number)

    def extend_stage(self, state: str, cluster: str) -> None:
        """Add a loop, branch, lookup or check to a third of all stages, or, with one micro-batch, a written metric."""
        kind = self.draw.choices(["", "loop", "branch", "lookup", "check", "write"], [70, 10, 8, 6, 4, 4])[0]
        lines = {
            "loop": ["for _ in tf.range(2):", f"    {state} = tf.tanh({state} * v{cluster})"],
            "branch": [f"if s{cluster} > .5:", f"    {state} = {state} * v{cluster}"],
            "lookup": [f"{state} += tf.nn.embedding_lookup(v{cluster}, tf.range(4))"],
            "check": [f"{state} = tf.debugging.check_numerics({state}, 'not finite')"],
            "write": [f"if s{cluster} > .3:", f"    m{cluster}.assign(.5 * m{cluster} + tf.reduce_mean({state}))"],
        }
        for line in lines.get(kind, ()) if kind != "write" or self.micro_batch == 1 else ():
            self.add(line, 2)

    def differentiate(self, number: int) -> None:
        """The gradients of a forward; with an optimizer, or for a part of the variables by the step, an update."""
        gradients = {name: f"g{number}{name}" for name in self.trained}
        asked = ", ".join([*gradients, "x"])
        self.add(f"*given, gx{number} = tape.gradient(loss{number}, [{asked}], unconnected_gradients='zero')")
        self.add(f"{', '.join(gradients.values())} = given")
        for name, gradient in gradients.items():
            (self.scalars if name[0] == "s" else self.vectors).append(gradient)
        if self.draw.random() < 0.3:
            kind = self.draw.choice(["SGD(.05, momentum=.9)", "Adam(.01)", "SGD(.1, global_clipnorm=.1)"])
            variables = f"[{', '.join(self.trained)}]"
            self.made += [f"opt{number} = tf.keras.optimizers.{kind}", f"opt{number}.build({variables})"]
            self.add(f"opt{number}.apply_gradients(zip(given, {variables}))")
        for name in self.draw.sample(self.trained, self.draw.randint(0, len(self.trained))):
            self.add(f"{name}.assign_sub(.05 * {gradients[name]})")

    def write(self, depth: int = 0, cluster: str = "") -> None:
        """A write of a variable; of this cluster or of none, if one is given."""
        own = [name for name in self.kinds if name[0] != "f" and (not cluster or name[1:] in (cluster, "0", "1"))]
        name = self.draw.choice(own)
        if self.kinds[name] == "v" and self.draw.random() < 0.1:
            self.add(f"{name}[1].assign({self.fill('tf.tanh({s})')})", depth)
            return
        expression = self.fill(self.draw.choice(SCALARS if self.kinds[name] == "s" else VECTORS))
        self.add(f"{name}.{self.draw.choice(WRITES).format(f'tf.tanh({expression})')}", depth)

    def statement(self) -> None:
        """A statement of an update: a new value, a write, a branch or loop with writes, or an assertion."""
        kinds = {"value": 30, "write": 40, "branch": 12, "loop": 6, "assertion": 8, "metric": 5}
        kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
        one = self.draw.choice(["", *self.clusters])  # the cluster whose variables a branch writes
        if kind == "value":
            known, templates = self.draw.choice([(self.scalars, SCALARS), (self.vectors, VECTORS)])
            name = f"t{len(self.lines)}"
            self.add(f"{name} = {self.fill(self.draw.choice(templates))}")
            known.append(name)
        elif kind == "write":
            self.write()
        elif kind == "metric":
            name = f"mean{len(self.lines)}"
            self.made.append(f"{name} = tf.keras.metrics.Mean()")
            self.add(f"{name}.update_state({self.fill('{s}')})")
            self.add(f"{name}_now = {name}.result()")
            self.scalars.append(f"{name}_now")
        elif kind == "assertion":
            self.add(f"tf.debugging.assert_less(tf.abs({self.fill(self.draw.choice(SCALARS))}), 1e9)")
        else:
            self.add(f"if {self.fill('{s} > {s}')}:" if kind == "branch" else "for _ in tf.range(2):")
            for _ in range(self.draw.choice([1, 1, 2])):
                self.write(1, one)
            if kind == "branch" and self.draw.random() < 0.3:
                self.add("else:")
                self.write(1, one)

    def text(self) -> str:
        """The text of the module."""
        values = {"s": "{:.2f}", "v": "tf.fill([4], {:.2f})"}
        made = [
            f"    {name} = tf.Variable({values[kind].format(self.draw.uniform(0.2, 1.0))}, name='{name}')"
            for name, kind in self.kinds.items()
        ]
        made += [f"    {line}" for line in self.made]
        step = [f"        {line}" for line in (*self.lines, f"return {', '.join(self.returned)},")]
        head = ["import tensorflow as tf", "def make(nb):", *made, "    @nb.function", "    def step(x):"]
        return "\n".join([*head, *step, f"    return step, [{', '.join(self.kinds)}]", ""])


def draw_step(seed: int, clusters: Mapping[str, int], micro_batch: int) -> str:
    """The module of a random step, in two fifths of all cases with two forwards."""
    writer = StepWriter(clusters, micro_batch, seed)
    draw, factor = writer.draw, ""
    if draw.random() < 0.3:
        if draw.random() < 0.5:
            writer.add("m0.assign_add(.1)")
        writer.add("factor = tf.tanh(m0.read_value())")
        writer.scalars.append("factor")
        factor = " * factor"
    for number in range(2 if draw.random() < 0.4 else 1):
        writer.forward(number, factor)
        for _ in range(draw.randint(1, 6)):
            writer.statement()
    writer.returned = [*draw.sample(writer.scalars, 2), *draw.sample(writer.vectors, draw.randint(0, 1)), "m1 + 0."]
    return writer.text()


FORWARD = """\
with tf.GradientTape() as tape, nb.cluster(), nb.pipeline({micro_batch}):
    with nb.stage(cluster='c0'):
        hidden = tf.tanh(x * vc0) * sc0{first}
    with nb.stage(cluster='c1'):
        loss{number} = tf.reduce_mean((hidden * vc1 * sc1{second}) ** 2)
gvc0, gsc0, gvc1, gsc1 = tape.gradient(loss{number}, [vc0, sc0, vc1, sc1])"""


def write_forward(number: int, first: str = "", second: str = "", micro_batch: int = 1) -> list[str]:
    """The lines of a forward in two clusters, with a factor in each stage."""
    return FORWARD.format(number=number, first=first, second=second, micro_batch=micro_batch).splitlines()


def write_step(lines: Sequence[str], returned: str) -> str:
    """The module of a step with these lines."""
    writer = StepWriter({"c0": 1, "c1": 1})
    writer.lines, writer.returned = list(lines), [returned]
    return writer.text()


@contextlib.contextmanager
def no_scope(*_: Any, **options: Any) -> Iterator[None]:
    """A scope without effect."""
    yield


PLAIN = SimpleNamespace(function=tf.function, cluster=no_scope, stage=no_scope, replica=no_scope, pipeline=no_scope)


def run_step(text: str, api: Any, name: str) -> tuple[list[Any], dict[str, Any]]:
    """The results of all steps, and the last values of the variables; those of other processes are absent."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # it changes the rounding
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        step, variables = module.make(api)
        rows = np.random.default_rng(len(text)).normal(size=(STEPS, ROWS, WIDTH)).astype("float32")
        results = [[np.asarray(each).tolist() for each in step(tf.constant(batch))] for batch in rows]
    return results, {each.name: value for each in variables if (value := read(each)) is not None}


def read(variable: tf.Variable) -> Any:
    """The value of a variable; None if another process holds it."""
    with contextlib.suppress(NebulaError):
        return np.asarray(variable).tolist()
    return None
