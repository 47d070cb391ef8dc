"""Custom training steps as Python modules, drawn by a seed: forwards, and updates that combine values of all clusters.

Each module has a function `make(nb)`, which returns functions and their variables, and `CALLS`, the calls of a run.
With `PLAIN` for `nb`, the functions are each a `tf.function` without scopes, to which the cut ones are compared; if
codecs lose digits, they are compared to the same functions in one process.
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

from whale_nebula.errors import CaptureError, NebulaError, NotYetError, PlanError, ScopeError

STEPS, ROWS, WIDTH = 3, 8, 4
REFUSALS = (CaptureError, NotYetError, PlanError, ScopeError)
"""The errors of steps that are not run."""

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
MATRICES = (
    "tf.tanh({w} + {w})", "{w} * {s}", "tf.sin({w} * {w})", "tf.reverse({w}, [1])", "{w} * {v}[:, None]",
    "tf.concat([{w}[:, 8:], {w}[:, :8]], 1)", "tf.transpose(tf.reshape({w}, [16, 4]))", "{W}.read_value()",
    "tf.linalg.l2_normalize({w}, 1)", "tf.matmul(tf.matmul({w}, {w}, transpose_b=True), {w})", "tf.fill([4, 16], {s})",
)  # fmt: skip
REDUCED = {
    "s": ("tf.reduce_mean({w})", "tf.tanh(tf.norm({w}))", "{w}[1, 5]", "tf.reduce_max({w})"),
    "v": (
        "tf.reduce_mean({w}, 1)",
        "{w}[:, 3]",
        "tf.reduce_max({w}, 1)",
        "tf.linalg.matvec({w}, tf.reduce_mean({w}, 0))",
    ),
}
"""Scalars and vectors that are made of matrices."""
STAGES = (
    "tf.tanh({h} * v{c})", "tf.tanh({h} + v{c}) * s{c}", "{h} * v{c} * s{c}", "tf.sin({h} * s{c}) + {h} * v{c}",
)  # fmt: skip
WIDE = (
    "tf.nn.softmax({h})", "tf.nn.log_softmax({h}) / 9.", "{h} - tf.reduce_mean({h}, 1, keepdims=True)",
    "tf.nn.relu({h})", "tf.math.l2_normalize({h} + .1, 1)", "tf.reverse({h}, [1])",
    "tf.concat([{h}[:, 8:], {h}[:, :8]], 1)", "tf.cumsum({h}, 1) / 9.",
    "tf.reshape(tf.transpose(tf.reshape({h}, [-1, 4, 4]), [0, 2, 1]), [-1, 16])",
    "tf.roll({h}, 3, 1)", "tf.math.top_k({h}, 16).values", "tf.gather({h}, [3, 1, 15, 7] * 4, axis=1)",
    "tf.where({h} > 0., {h}, .1 * {h})", "{h} * tf.one_hot(tf.argmax({h}, 1), 16)", "tf.sort({h}, 1)",
    "tf.pad({h}[:, 2:], [[0, 0], [1, 1]])", "tf.tile({h}[:, 3:7], [1, 4])", "tf.repeat({h}[:, ::2], 2, 1)",
    "tf.concat(tf.split({h}, 4, 1)[::-1], 1)", "tf.stack(tf.unstack({h}, axis=1)[::-1], 1)",
    "tf.einsum('bj,ji->bi', tf.einsum('bi,ji->bj', {h}, {w}), {w})", "{h} + tf.gather({w}, {i} % 4)",
    "tf.reduce_max({h}, 1, keepdims=True) - {h}", "{h} * tf.nn.moments({h}, [1], keepdims=True)[1]",
    "tf.minimum({h}, tf.reduce_mean({w}, 0))", "tf.nn.bias_add({h}, {w}[1])", "tf.squeeze({h}[:, None, :], 1)",
    "tf.where(tf.range(16) % 3 == 0, {h}, 0.)", "tf.math.cumprod(tf.tanh({h}), 1)", "tf.clip_by_value({h}, -.3, .4)",
    "tf.concat([{h}[:, :5], tf.broadcast_to(x[:, :1], tf.shape({h}[:, 5:]))], 1)", "tf.map_fn(tf.tanh, {h})",
    "{h} * tf.cast(tf.math.in_top_k({i} % 16, {h}, 5), tf.float32)[:, None]",
    "{h} + tf.nn.sparse_softmax_cross_entropy_with_logits({i} % 16, {h})[:, None]",
    "{h} + tf.reduce_logsumexp({h}, 1, keepdims=True) / 9.", "tf.matmul({h}, tf.matmul({w}, {w}, transpose_a=True))",
    "tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax({h}[:, ::-1]), {h})[:, None] * {h}",
    "{h} * tf.norm({w}, axis=0)", "{h} + tf.linalg.diag_part(tf.matmul({w}, {w}, transpose_a=True))",
    "tf.matmul(tf.nn.softmax(tf.matmul({h}, {w}, transpose_b=True)), {w})",
    "tf.reshape(tf.einsum('bhd,bhe->bde', *[tf.reshape(tf.tanh({h}), [-1, 4, 4])] * 2), [-1, 16])",
)  # fmt: skip
"""Expressions of rows {h} of 16 numbers, a matrix {w} and an integer {i} for each row."""
WRITES = ("assign_sub(.05 * {})", "assign_add(.05 * {})", "assign({})")
"""Writes of an expression into a variable. In expressions {s} is a scalar, {v} a vector, {w} a matrix of [4, 16], and
{S}, {V} and {W} are such variables.
"""
CODECS = (
    "fp16=True", "bf16=True", "int8=True", "int4=True", "svd=.5", "svd=.6, fp16=True", "topk=.25", "topk=.5, int8=True",
    "'axes >> coded(4)'",
)  # fmt: skip
STATEFUL = ("rank=2", "rank=4, int8=True", "int8=True, ramp=['fp16']")
"""Codecs whose state each pair of workers has, so that results depend on the number of replicas."""
BACKWARDS = ("", ", backward='fp16'", ", backward=None", ", backward='int4'")
UNUSED = "start_step=99"
"""An option of a codec that is never used."""
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble")
SIZES = ((8, 8, 8), (8, 4, 8), (8, 6, 8), (7, 8, 5), (8, 2, 16))
"""The rows of the batches of a run."""


class StepWriter:
    """Writes the module of a step, statement by statement. It has a stage in each cluster, with so many workers."""

    def __init__(self, clusters: Mapping[str, int], micro_batch: int = 1, seed: int = 0, wide: bool = False) -> None:
        self.draw = random.Random(seed)
        self.clusters, self.wide = clusters, wide
        self.kinds: dict[str, str] = {}
        self.functions: list[str] = []
        self.calls: list[tuple[int, int, str, bool]] = [(0, ROWS, "float32", False)] * STEPS
        owned = [f"{kind}{cluster}" for cluster in clusters for kind in ("svw" if wide else "sv")]
        self.trained = [*owned, "vt", "sq"]  # vt is tied, sq belongs to no stage
        own = [f"m{cluster}" for cluster in clusters]
        for name in [*self.trained, *own, "m0", "m1", "n0", "n1", "f0", "f1"]:  # metrics m, vectors n, and constants f
            self.kinds[name] = "s" if name[0] in "sm" or name == "f0" else "w" if name[0] == "w" else "v"
        self.made: list[str] = []
        self.replicas = {cluster: f"nb.replica({count}), " for cluster, count in clusters.items() if count > 1}
        self.splits: dict[str, str] = {}
        self.options, self.compress = "", ""
        self.begin(micro_batch)

    def begin(self, micro_batch: int) -> None:
        """Begin a function, of which nothing is known yet."""
        self.micro_batch = micro_batch
        self.lines: list[str] = []
        self.known: dict[str, list[str]] = {"s": [], "v": [], "w": []}
        self.returned: list[str] = []

    def end(self, name: str) -> None:
        """End the function, which has this name."""
        head = ["    @nb.function", f"    def {name}(x, late=False):"]
        self.functions.append(name)
        self.made += [*(line[4:] for line in head), *(f"    {line}" for line in self.lines)]
        self.made.append(f"    return {', '.join(self.returned)},")

    def draw_scopes(self) -> None:
        """Draw the scopes and their options, which all forwards of a function have."""
        draw = self.draw
        for cluster, count in self.clusters.items():
            if count > 1 and draw.random() < 0.5:
                both = count > 2 and count % 2 == 0  # two replicas of several devices
                devices, axis = count // (1 + both), draw.choice([0, -1, 1] if self.wide else [0, -1])
                self.splits[cluster] = f", nb.split({devices}, axis={axis})"
                self.replicas |= {cluster: "nb.replica(2), " if both else ""}
        self.options = draw.choice(["", f", schedule={draw.choice(SCHEDULES)!r}"])
        self.options += draw.choice(["", "", f", in_flight={draw.randint(1, 3)}"])
        self.options += draw.choice(["", "", "", ", recompute=True"])
        if draw.random() < 0.3:
            codec = draw.choice(CODECS if any(self.replicas.values()) else [*CODECS, *STATEFUL])
            back = draw.choice(["", f", backward={codec}" if codec[0] == "'" else "", *BACKWARDS])
            self.compress = f", nb.compress({codec}{back}{draw.choice(['', '', f', {UNUSED}'])})"

    def add(self, line: str, depth: int = 0) -> None:
        """Add a line to the step."""
        self.lines.append("    " * depth + line)

    def fill(self, template: str) -> str:
        """An expression with known values or variables in its gaps."""

        def choose(found: re.Match[str]) -> str:
            kind = found[1].lower()
            known = self.known[kind]
            variables = [name for name, own in self.kinds.items() if own == kind]
            return self.draw.choice(known if known and found[1] == kind and self.draw.random() < 0.8 else variables)

        return re.sub(r"{([svwSVW])}", choose, template)

    def choose_template(self, kind: str) -> str:
        """A template of this kind."""
        templates = {"s": SCALARS, "v": VECTORS, "w": MATRICES}[kind]
        return self.draw.choice([*templates, *REDUCED.get(kind, ())] if self.wide else templates)

    def forward(self, number: int, factor: str = "", trained: bool = True) -> None:
        """A forward with a stage for each cluster, and its gradients, which an optimizer or the step applies."""
        of_all = self.draw.random() < 0.5  # whether a codec is that of all boundaries
        tape = "tf.GradientTape() as tape, " if trained else ""
        scopes = f"nb.cluster(), nb.pipeline({self.micro_batch}{self.options}){self.compress if of_all else ''}"
        self.add(f"with {tape}{scopes}:")
        if trained:
            self.add("tape.watch(x)", 1)
        if self.draw.random() < 0.2:
            self.add(f"shared{number} = tf.exp(sq)", 1)
            factor += f" * shared{number}"
        if number and self.draw.random() < 0.4:
            factor += f" * {self.draw.choice(self.known['v'] + self.known['s'])}"
        state, tied = "x", self.draw.random() < 0.3
        if number and trained and self.micro_batch == 1 and self.draw.random() < 0.3:
            state = f"(x + .1 * tf.sign(gx{number - 1}))"
        for place, cluster in enumerate(self.clusters):
            codec = self.compress if place and not of_all else ""
            around = (
                f"{self.replicas.get(cluster, '')}nb.stage(cluster='{cluster}'){self.splits.get(cluster, '')}{codec}"
            )
            self.add(f"with {around}:", 1)
            if place and self.wide:
                state = f"tf.matmul({state}, w{cluster}, transpose_b=True)"
            made = self.draw.choice(STAGES).format(h=state, c=cluster)
            frozen = self.draw.choice(["", "", " * f0", " * f1"])
            self.add(f"h{number} = {made}{frozen}{factor}{' * vt' * tied}", 2)
            state = f"h{number}"
            self.extend_stage(state, cluster)
            if place == 0 and self.draw.random() < 0.3:
                self.add(f"aux{number} = tf.reduce_mean({state})", 2)
                self.known["s"].append(f"aux{number}")
            if self.micro_batch == 1 and self.draw.random() < 0.15:
                self.add(f"n{place % 2}.assign(.9 * n{place % 2} + .1 * tf.reduce_mean({state}, 0))", 2)
            if self.wide and place < len(self.clusters) - 1:
                self.add(f"{state} = tf.matmul({state}, w{cluster})", 2)
                for template in self.draw.choices(WIDE, k=self.draw.choice([0, 1, 2, 4])):
                    row = "tf.cast(tf.abs(x[:, 0] * 4.), tf.int32)"
                    self.add(f"{state} = {template.format(h=state, w=f'w{cluster}', i=row)}", 2)
        self.add(f"loss{number} = tf.reduce_mean({state} ** 2)", 2)
        self.known["s"].append(f"loss{number}")
        if trained:
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
            self.known[self.kinds[name]].append(gradient)
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
        expression = self.fill(self.choose_template(self.kinds[name]))
        self.add(f"{name}.{self.draw.choice(WRITES).format(f'tf.tanh({expression})')}", depth)

    def statement(self) -> None:
        """A statement of an update: a new value, a write, a branch or loop with writes, or an assertion."""
        kinds = {"value": 30, "write": 40, "branch": 12, "loop": 6, "assertion": 8, "metric": 5, "option": 5}
        kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
        one = self.draw.choice(["", *self.clusters])  # the cluster whose variables a branch writes
        if kind == "value":
            form, name = self.draw.choice("svw" if self.wide else "sv"), f"t{len(self.lines)}"
            self.add(f"{name} = {self.fill(self.choose_template(form))}")
            self.known[form].append(name)
        elif kind == "write":
            self.write()
        elif kind == "metric":
            name = f"mean{len(self.functions)}{len(self.lines)}"
            self.made.append(f"{name} = tf.keras.metrics.Mean()")
            self.add(f"{name}.update_state({self.fill('{s}')})")
            self.add(f"{name}_now = {name}.result()")
            self.known["s"].append(f"{name}_now")
        elif kind == "assertion":
            self.add(f"tf.debugging.assert_less(tf.abs({self.fill(self.choose_template('s'))}), 1e9)")
        else:
            heads = {"branch": f"if {self.fill('{s} > {s}')}:", "loop": "for _ in tf.range(2):", "option": "if late:"}
            self.add(heads[kind])
            for _ in range(self.draw.choice([1, 1, 2])):
                self.write(1, one)
            if kind == "branch" and self.draw.random() < 0.3:
                self.add("else:")
                self.write(1, one)

    def text(self) -> str:
        """The text of the module."""
        values = {
            "s": "{:.2f}",
            "v": "tf.fill([4], {:.2f})",
            "w": "tf.sin({:.2f} * tf.reshape(tf.range(64.), [4, 16])) / 4.",
        }
        made = [
            f"    {name} = tf.Variable({values[kind].format(self.draw.uniform(0.2, 1.0))}, name='{name}')"
            for name, kind in self.kinds.items()
        ]
        made += [f"    {line}" for line in self.made]
        end = f"    return [{', '.join(self.functions)}], [{', '.join(self.kinds)}]"
        return "\n".join(["import tensorflow as tf", f"CALLS = {self.calls}", "def make(nb):", *made, end, ""])


def draw_step(seed: int, clusters: Mapping[str, int], micro_batch: int) -> str:
    """The module of a random step: two fifths have two forwards, a third have a second function."""
    draw = random.Random(-seed)
    writer = StepWriter(clusters, micro_batch, seed, draw.random() < 0.4)
    writer.draw_scopes()
    _draw_function(writer, 2 if writer.draw.random() < 0.4 else 1)
    writer.end("step")
    sizes = draw.choice(SIZES) if draw.random() < 0.4 else (ROWS,) * STEPS
    second = draw.random() < 0.35
    if second:
        writer.begin(draw.choice([1, micro_batch]))
        _draw_function(writer, 1, trained=draw.random() < 0.5)
        writer.end("other")
    dtypes, flags = (draw.random() < 0.1, draw.random() < 0.3)
    writer.calls = [
        (
            int(second and turn == 1),
            rows,
            "float64" if dtypes and draw.random() < 0.5 else "float32",
            flags and turn == 2,
        )
        for turn, rows in enumerate([*sizes, *sizes[: 2 * second]])
    ]
    return writer.text()


def _draw_function(writer: StepWriter, forwards: int, trained: bool = True) -> None:
    """The lines of a function with so many forwards, and what it returns."""
    draw, factor = writer.draw, ""
    writer.add("x = tf.cast(x, tf.float32)")
    if draw.random() < 0.3:
        if draw.random() < 0.5:
            writer.add("m0.assign_add(.1)")
        writer.add("factor = tf.tanh(m0.read_value())")
        writer.known["s"].append("factor")
        factor = " * factor"
    for number in range(forwards):
        writer.forward(number, factor, trained)
        for _ in range(draw.randint(1, 6) if trained else draw.randint(0, 2)):
            writer.statement()
    scalars, others = writer.known["s"], writer.known["v"] + writer.known["w"]
    writer.returned = [*draw.sample(scalars, min(2, len(scalars))), "m1 + 0."]
    writer.returned += draw.sample(others, draw.randint(0, min(1, len(others))))
    if draw.random() < 0.2:
        writer.returned.append("h0")


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
    writer = StepWriter({"c0": 1, "c1": 1}, wide=True)
    writer.lines, writer.returned = list(lines), [returned]
    writer.end("step")
    return writer.text()


@contextlib.contextmanager
def no_scope(*_: Any, **options: Any) -> Iterator[None]:
    """A scope without effect."""
    yield


PLAIN = SimpleNamespace(
    **dict.fromkeys(("cluster", "stage", "replica", "pipeline", "split", "compress"), no_scope),
    function=tf.function,
)


def loses_digits(text: str) -> bool:
    """Whether a step has a codec that is used."""
    return "nb.compress(" in text and UNUSED not in text


def run_step(text: str, api: Any, name: str) -> tuple[list[Any], dict[str, Any]]:
    """The results of all calls, and the last values of the variables; those of other processes are absent."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # it changes the rounding
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        functions, variables = module.make(api)
        numbers = np.random.default_rng(len(text))
        results = []
        for function, rows, dtype, late in module.CALLS:
            batch = tf.constant(numbers.normal(size=(rows, WIDTH)).astype("float32"), dtype)
            options = {"late": True} if late else {}
            results.append([np.asarray(each).tolist() for each in functions[function](batch, **options)])
    return results, {each.name: value for each in variables if (value := read(each)) is not None}


def read(variable: tf.Variable) -> Any:
    """The value of a variable; None if another process holds it."""
    with contextlib.suppress(NebulaError):
        return np.asarray(variable).tolist()
    return None
