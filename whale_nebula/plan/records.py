"""The records of a Plan: its stages, its boundaries, and what runs once a step.

Counts say by their names of what they are: `step_...` and FLOPs are those of a whole step of the example,
`activation_bytes` and a boundary's `bytes` those of its first micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Count = Mapping[str, int]


@dataclass(frozen=True)
class PlanLayer:
    """A part of a stage by its name, such as "block0/attention"; "" is what stands in no layer.

    A layer counts what lies directly in it: the parts inside it have rows of their own.
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

    `inputs` and `outputs` are leaves of the batch, boundaries (b0, b1 ...) and what the step returns, by its name in a
    dict or its place in a tuple ("loss" is what is differentiated, "result" all that is returned, where neither has a
    name); `runs` says for each phase what the stage does in it: "F", "B", "FB" or nothing, and "W" where
    gradients of weights are apart from the backward: they take `weights_flops` of `backward_flops`. `activation_bytes`
    is what a micro-batch keeps for its backward, `in_flight` how many micro-batches do so at a time. What a loop does
    of which nothing tells how often it turns counts once; `open_loops` says how many there are. Of several replicas
    `order` says which takes which micro-batch, where they do not take turns, and `speeds` what the config says of them.
    A stage that is split has so many `shards`, and `shard_bytes` are those of the variables that each of them holds.
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

        The working memory of single ops and of TensorFlow itself comes on top of it.
        """
        return self.kept_bytes + self.variable_bytes + self.gradient_bytes + self.slot_bytes


@dataclass(frozen=True)
class PlanCollective:
    """A collective between the devices of a split stage: `bytes` sent by each device each time, `times` in a step.
    `where` is the part of the step, `tensor` the op that makes the operand. `seconds` is what it takes each time, None
    where nobody has said or measured what joins the workers of the cluster.
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
    """One tensor that crosses, and the bytes that a micro-batch of it takes; None where only a step knows.

    `maker` is the layer that makes the tensor, or the op where it stands in no layer. `step_bytes` and
    `backward_step_bytes` are what a step puts on lines for it, `seconds` and `backward_seconds` for how long that holds
    the slowest of them; None where there is no rate. Inside a cluster nothing is on a line.
    `codec_seconds` and `backward_codec_seconds` are what one core takes to encode and decode them, about; None where
    nothing crosses a line, and of codecs of which that is not known. `encode_seconds` and `backward_encode_seconds` are
    what of that the side takes that sends. On a ramp all of this is of its last precision; `rungs` and
    `backward_rungs` are the bytes of a micro-batch with each one before. `used` and `backward_used` are what of the
    codecs a micro-batch takes, where all of it would not make it smaller and it is less; see `taken`.
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
        """How a micro-batch crosses, in both directions."""
        return self.used or self.codec, self.backward_used or self.backward_codec


@dataclass(frozen=True)
class PlanLink:
    """The link between two clusters in one direction, with a step's load.

    `bytes` are those of the tensors, `wire_bytes` with their frames; `rate` is in bits a second (None: free), `delay`
    in seconds. `at_most` says that there may be less, because values in the batch decide it.
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
        """For how long a step holds the line; None where it has no rate."""
        return 8 * self.wire_bytes / self.rate if self.rate else None


@dataclass(frozen=True)
class PlanOnce:
    """What one worker runs once a step in one phase: `kind` is whole, prologue or update."""

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

    `bytes` are those of the variable. Between processes each cluster sends its gradient to the others once a step:
    `link_bytes` says how much, by the link, and `seconds` for how long that holds the slowest line; `at_most` that
    there may be less, because values in the batch decide how many rows of it are looked up.
    """

    path: str
    dtype: str
    shape: tuple[int | None, ...] | None
    stages: tuple[str, ...]
    bytes: int
    link_bytes: Count = field(default_factory=dict)
    seconds: float | None = None
    at_most: bool = False


# ---------------------------------------------------------------------- of plans that the planner has chosen
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
    """Seconds of a step where all lines were slower or faster.

    `factors` are multiples of the configured rate, which is `rate` in bits a second where all lines have the same one.
    `best` are the seconds of the best plan at each, which `best_plans` names; `plans` those of the best candidates.
    """

    factors: tuple[float, ...]
    rate: float | None
    best: tuple[float, ...]
    best_plans: tuple[str, ...]
    plans: Mapping[str, tuple[float, ...]]
