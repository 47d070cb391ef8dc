"""The records of a Plan: its stages, its boundaries, and the parts that run once per step.

The scope of a count follows from its name: `step_...` and FLOPs are those of a whole step of the example,
`activation_bytes` and a boundary's `bytes` those of its first micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Count = Mapping[str, int]


@dataclass(frozen=True)
class PlanLayer:
    """A part of a stage by its name, such as "block0/attention"; "" is for ops in no layer.

    A layer counts only ops directly in it: its sublayers have rows of their own.
    """

    name: str
    forward_ops: int = 0
    backward_ops: int = 0
    parameters: int = 0
    flops: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True)
class PlanStage:
    """One stage: its workers, its size, its inputs and outputs.

    `inputs` and `outputs` are leaves of the batch, boundaries (b0, b1 ...) and the step's results, by name in a dict or
    place in a tuple (without names, "loss" is the differentiated value and "result" all that is returned); `runs` has
    the functions of the stage in each phase: "F", "B", "FB" or nothing, and "W" for gradients of weights separate from
    the backward, which take `weights_flops` of `backward_flops`. `activation_bytes` are kept by a micro-batch for its
    backward, `in_flight` is the number of such micro-batches at a time. A loop with an unknown number of iterations
    counts once; `open_loops` is the number of those. `order` assigns micro-batches to replicas, unless they take turns,
    and `speeds` are those of the config. A split stage has `shards`, each with `shard_bytes` of variables.
    """

    name: str
    cluster: str
    worker: str
    forward_ops: int
    backward_ops: int
    variables: tuple[str, ...]
    parameters: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    runs: tuple[str, ...]
    forward_flops: int = 0
    backward_flops: int = 0
    activation_bytes: int = 0
    in_flight: int = 0
    variable_bytes: int = 0
    gradient_bytes: int = 0
    slot_bytes: int = 0
    open_loops: int = 0
    layers: tuple[PlanLayer, ...] = ()
    replicas: int = 1
    order: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    shards: int = 1
    shard_bytes: int = 0
    weights_flops: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of a step, forward and backward."""
        return self.forward_flops + self.backward_flops

    @property
    def kept_bytes(self) -> int:
        """Bytes of the activations that all micro-batches in flight keep for their backward."""
        return self.activation_bytes * self.in_flight

    @property
    def memory_bytes(self) -> int:
        """Peak memory of a step: kept activations, variables, gradients, slots.

        The working memory of single ops and of TensorFlow itself is not included.
        """
        return self.kept_bytes + self.variable_bytes + self.gradient_bytes + self.slot_bytes


@dataclass(frozen=True)
class PlanCollective:
    """A collective between the devices of a split stage: `bytes` sent by each device each time, `times` in a step.
    `where` is the part of the step, `tensor` the op that makes the operand. `seconds` is the time of each, None if the
    link between the cluster's workers is neither configured nor measured.
    """

    kind: str
    bytes: int
    stage: str
    tensor: str
    where: str
    times: int = 1
    seconds: float | None = None


@dataclass(frozen=True)
class PlanBoundary:
    """One tensor that crosses, with the bytes of a micro-batch; None if known only at run time.

    `maker` is the layer that makes the tensor, or the op if it is in no layer. `step_bytes` and `backward_step_bytes`
    are the bytes on links in a step, `seconds` and `backward_seconds` how long they occupy the slowest link; None
    without a rate. Transfers inside a cluster use no link. `codec_seconds` and `backward_codec_seconds` are the
    approximate seconds of one core to encode and decode them; None if nothing crosses a link, or for codecs with
    unknown costs. `encode_seconds` and `backward_encode_seconds` are the sender's part. For a ramp all of this refers
    to its last precision; `rungs` and `backward_rungs` are the bytes of a micro-batch with each earlier one. `used` and
    `backward_used` are the part of the codecs that a micro-batch uses, if the whole codec would not make it smaller;
    see `taken`.
    """

    name: str
    source: str
    destinations: tuple[str, ...]
    dtype: str
    shape: tuple[int | None, ...] | None
    phase: int
    codec: str
    bytes: int | None
    backward: bool
    backward_codec: str
    backward_bytes: int | None
    step_bytes: int | None = None
    backward_step_bytes: int | None = None
    seconds: float | None = None
    backward_seconds: float | None = None
    codec_seconds: float | None = None
    backward_codec_seconds: float | None = None
    encode_seconds: float | None = None
    backward_encode_seconds: float | None = None
    rungs: tuple[int, ...] = ()
    backward_rungs: tuple[int, ...] = ()
    maker: str = ""
    used: str = ""
    backward_used: str = ""

    @property
    def taken(self) -> tuple[str, str]:
        """The encodings used for a micro-batch, in both directions."""
        return self.used or self.codec, self.backward_used or self.backward_codec


@dataclass(frozen=True)
class PlanLink:
    """The link between two clusters in one direction, with a step's load.

    `line` is its rate and delay in words. `bytes` are those of the tensors, `wire_bytes` with their frames; `rate` is
    in bits per second (None: free), `delay` in seconds. With `at_most` the bytes are upper bounds, as values in the
    batch decide.
    """

    line: str
    bytes: int
    wire_bytes: int = 0
    messages: int = 0
    rate: float | None = None
    delay: float = 0.0
    at_most: bool = False

    @property
    def seconds(self) -> float | None:
        """Seconds for which a step occupies the link; None without a rate."""
        return 8 * self.wire_bytes / self.rate if self.rate else None


@dataclass(frozen=True)
class PlanOnce:
    """The part of a phase that one worker runs once per step: `kind` is whole, prologue or update.

    `rounds` is the number of its fragments, between which it waits for values of other workers. `writes` are the paths
    of the variables that it changes, of which `trainable` have a gradient.
    """

    kind: str
    phase: int
    worker: str
    ops: int
    rounds: int
    writes: tuple[str, ...]
    trainable: int


@dataclass(frozen=True)
class PlanTied:
    """A variable that two or more stages use: each holds it, and its gradients are summed.

    `bytes` are those of the variable. Between processes each cluster sends its gradient to the others once per step:
    `link_bytes` are the bytes by link, and `seconds` how long they occupy the slowest link; with `at_most` they are
    upper bounds, as values in the batch decide how many rows are looked up.
    """

    path: str
    dtype: str
    shape: tuple[int | None, ...] | None
    stages: tuple[str, ...]
    bytes: int
    link_bytes: Count = field(default_factory=dict)
    seconds: float | None = None
    at_most: bool = False


# ---------------------------------------------------------------------- plans chosen by the planner
@dataclass(frozen=True)
class Predicted:
    """Predicted costs of a step: seconds, bytes of memory by worker, bytes by link, and the share of the seconds that
    rests on measured rates.
    """

    seconds: float
    memory: Mapping[str, int]
    bytes: Mapping[str, int]
    share_measured: float


@dataclass(frozen=True)
class Considered:
    """A candidate plan: its stages in words, how the batch is divided, its costs, and its bottleneck."""

    stages: str
    micro_batches: int
    schedule: str
    predicted: Predicted
    binds: str


@dataclass(frozen=True)
class RateCurves:
    """Seconds of a step if all links were slower or faster.

    `factors` are multiples of the configured rate, which is `rate` in bits per second if all links have the same one.
    `best` are the seconds of the best plan at each, named in `best_plans`; `plans` those of the best candidates.
    """

    factors: tuple[float, ...]
    rate: float | None
    best: tuple[float, ...]
    best_plans: tuple[str, ...]
    plans: Mapping[str, tuple[float, ...]]
