"""All errors and warnings, as one tree: a class for each cause.

Every error has four parts: *what* happened, *where*, *why*, and the *mend*: the line to write instead. Without a mend,
the class's default is used. `NebulaWarning` (NB-900) is for conditions that do not stop the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from whale_nebula.errors.text import MEND
from whale_nebula.errors.text import NebulaError as NebulaError
from whale_nebula.errors.text import NebulaWarning as NebulaWarning


class NotYetError(NebulaError):
    """A feature with a name in the API, but no implementation yet; it never falls back to another one.

    >>> error = NotYetError("nb.split")
    >>> error.feature, error.what
    ('nb.split', 'nb.split is not built yet')
    """

    code = "NB-001"
    recurs = True
    usual_mend = "leave it out for now; the README's table says what works"

    def __init__(
        self, feature: str, *, where: str | None = None, why: str | None = None, mend: str | None = None
    ) -> None:
        what = feature if MEND in feature else f"{feature} is not built yet"
        super().__init__(what, where=where, why=why, mend=mend)
        self.feature = feature

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.feature,), self.__dict__


class ScopeError(NebulaError):
    """Invalid use of scopes."""

    code = "NB-100"
    recurs = True
    usual_mend = "write 'with nb.stage(...):' around the layers of one stage"


class NestingError(ScopeError):
    """A scope inside one that must not contain it."""

    code = "NB-101"
    usual_mend = "nest scopes as cluster > replica > pipeline > stage > split, each at most once"


class StageOrderError(ScopeError):
    """A later stage whose output feeds an earlier one."""

    code = "NB-102"
    usual_mend = "give the second part a name of its own: nb.stage(cluster=..., name=...)"


class StageIdentityError(ScopeError):
    """Two stages that cannot be distinguished, or a stage with two definitions."""

    code = "NB-103"
    usual_mend = "give each stage a name of its own: nb.stage(cluster=..., name=...)"


class OptionError(ScopeError):
    """An option that does not exist, or an invalid value of one."""

    code = "NB-104"
    usual_mend = "help(nb.cluster), help(nb.pipeline) ... say what may be written"


class CaptureError(NebulaError):
    """A step that cannot be captured."""

    code = "NB-200"
    recurs = True
    usual_mend = "run the step without scopes first: if that works, report this with the script"


class BatchAxisError(CaptureError):
    """Inputs that cannot be divided along one batch axis."""

    code = "NB-201"
    usual_mend = "name what is not a batch: @nb.function(whole=('table',)), or use micro_batch=1"


class StaticBatchError(CaptureError):
    """A batch size that is a constant in the model."""

    code = "NB-202"
    usual_mend = "use tf.shape(x)[0] or -1 where the number of rows stands"


class GradientError(CaptureError):
    """A gradient request that cannot be fulfilled."""

    code = "NB-203"
    usual_mend = "ask for gradients with tape.gradient(loss, variables) inside the step"


class BoundaryInBodyError(CaptureError):
    """A scope inside a loop, a branch or a nested function, where no boundary is possible."""

    code = "NB-204"
    usual_mend = "enter the scope around the loop, the branch or the nested tf.function"


class BatchCoupledError(CaptureError):
    """Rows of a batch that depend on each other and would be divided.

    `op` and `line` identify the operation that couples them, `mends` are the possible mends.

    >>> error = BatchCoupledError("the loss couples the rows of a batch", op="loss/MatMul", line="train.py:7")
    >>> error.where
    'loss/MatMul, train.py:7'
    """

    code = "NB-205"
    usual_mends: ClassVar[tuple[str, ...]] = (
        "nb.pipeline(micro_batch=1)",
        "nb.loss_weight(t), if the loss is a mean over t",
        'nb.pipeline(..., coupled="allow"), which runs it micro-batch by micro-batch',
    )

    def __init__(
        self,
        what: str,
        *,
        op: str = "",
        line: str = "",
        mends: tuple[str, ...] = (),
        where: str | None = None,
        why: str | None = None,
        mend: str | None = None,
    ) -> None:
        self.op, self.line = op, line
        self.mends = mends or ((mend,) if mend else self.usual_mends)
        place = where or ", ".join(part for part in (op, line) if part)
        super().__init__(what, where=place, why=why, mend="\nor ".join(self.mends))


class UnsupportedError(CaptureError):
    """A setting of TensorFlow or Keras that is not supported, and therefore refused instead of ignored."""

    code = "NB-206"
    usual_mend = "leave that setting out, or take the scopes out"


class DataDependentError(CaptureError):
    """Python code that needs a tensor's value while the step is traced: `if`, `for`, `float()`, NumPy."""

    code = "NB-207"
    usual_mend = "say it with TensorFlow: tf.cond, tf.where, tf.while_loop, tf.map_fn"


class PlanError(NebulaError):
    """A program that cannot be planned."""

    code = "NB-210"
    recurs = True
    usual_mend = "nb.plan(model, *example).to_text() shows how far it came"


class PlanMismatchError(PlanError):
    """Programs or plans that differ between two workers, or between a step and its pin; the message has the first
    difference.
    """

    code = "NB-211"
    usual_mend = "start the same script with the same versions and thread counts in every cluster"


class PlacementError(PlanError):
    """An op, variable or layer without a place, or with two."""

    code = "NB-212"
    usual_mend = "name a cluster for it: nb.stage(cluster=...)"


class ForbiddenCrossingError(PlanError):
    """A step that would send a cluster data that depends on an input which the config forbids there."""

    code = "NB-213"
    usual_mend = "keep the stages that read it in its own cluster, or allow in the config what may go there"


class NotApprovedError(PlanError):
    """A program that the owner of this cluster has not approved; the message has the first difference."""

    code = "NB-214"
    usual_mend = "whale-nebula approve SCRIPT --config clusters.yaml, where the authority's key is"


class DataError(NebulaError):
    """Invalid training text or vocabulary: files that are missing or do not fit together.

    >>> print(DataError("train.en has an empty sentence", where="train.en.gz:17", mend='empty="skip"'))
    NB-220 train.en has an empty sentence (train.en.gz:17)
      mend: empty="skip"
    """

    code = "NB-220"
    recurs = True
    usual_mend = "look at the file that the message names; wc -l and head show most of it"


class WeightsError(NebulaError):
    """An invalid folder of trained weights: files or tensors are missing, or do not fit the model."""

    code = "NB-221"
    recurs = True
    usual_mend = "take model.safetensors, config.json and vocab.txt from one and the same model"


class RunError(NebulaError):
    """A run that cannot continue."""

    code = "NB-300"
    usual_mend = "start the run again"


class StageFailedError(RunError):
    """An exception of the user's model inside a stage.

    `torn` is true if an update had begun: if not, variables, metrics and seeds are as before the step.

    >>> error = StageFailedError("division by zero", stage="decoder", micro_batch=2)
    >>> print(error)
    NB-301 division by zero (stage 'decoder', phase 0, micro-batch 2)
      why: nothing was updated: variables, metrics and seeds are as they were before the step
      mend: mend what the stage raised, and run the step again
    """

    code = "NB-301"
    usual_mend = "mend what the stage raised, and run the step again"
    torn_mend = "mend what the stage raised, and start again from a checkpoint"

    def __init__(
        self,
        what: str,
        *,
        stage: str = "",
        phase: int = 0,
        micro_batch: int | None = None,
        torn: bool = False,
        where: str | None = None,
        why: str | None = None,
        mend: str | None = None,
    ) -> None:
        self.stage, self.phase, self.micro_batch, self.torn = stage, phase, micro_batch, torn
        state = "nothing was updated: variables, metrics and seeds are as they were before the step"
        if torn:
            state = "the step is torn: some variables hold its update and others do not"
        parts = [f"stage {stage!r}"] * bool(stage) + [f"phase {phase}"]
        parts += [] if micro_batch is None else [f"micro-batch {micro_batch}"]
        mend = mend or (self.torn_mend if torn else None)
        super().__init__(what, where=where or ", ".join(parts), why=why or state, mend=mend)


class RemoteFailureError(RunError):
    """A failure of another worker that stopped this one. `cause` is the code of its error, if it is one of these."""

    code = "NB-302"
    cause: str = ""
    usual_mend = "mend what failed there, and start all workers again"


class CollectiveReadError(RunError):
    """A read by one process alone of a value that another cluster holds."""

    code = "NB-303"
    recurs = True
    usual_mend = "read it in every process: get_weights, save, evaluate and predict are collective calls"


class InputMismatchError(RunError):
    """Clusters that were given different batches in the same step."""

    code = "NB-304"
    recurs = True
    usual_mend = "seed the shuffle: fit(shuffle=False), or dataset.shuffle(n, seed=...)"


class StateError(RunError):
    """A call at the wrong time."""

    code = "NB-305"
    recurs = True
    usual_mend = "nb.shutdown() ends a run and nb.init(...) opens one; neither while a step runs"


class AbsentInputError(RunError):
    """A missing input that a cluster reads, or whose rows it needs."""

    code = "NB-306"
    recurs = True
    usual_mend = "yield the input in this cluster as well, or read it in a stage of the cluster that has it"


class NonFiniteError(RunError):
    """A NaN or an infinity that would have entered the state of a boundary's codec.

    Nothing was updated, as this is detected before the update.

    >>> print(NonFiniteError("b0 gpu->npu has a NaN", boundary="b0 gpu->npu", stage="gpu", step=3, micro_batch=1))
    NB-307 b0 gpu->npu has a NaN (step 3, micro-batch 1 of stage 'gpu')
      mend: tf.debugging.enable_check_numerics() finds the op; nb.compress(..., nonfinite="skip") leaves such steps out
    """

    code = "NB-307"
    usual_mend = (
        'tf.debugging.enable_check_numerics() finds the op; nb.compress(..., nonfinite="skip") leaves such steps out'
    )

    def __init__(
        self,
        what: str,
        *,
        boundary: str = "",
        stage: str = "",
        step: int | None = None,
        micro_batch: int | None = None,
        where: str | None = None,
        why: str | None = None,
        mend: str | None = None,
    ) -> None:
        self.boundary, self.stage, self.step, self.micro_batch = boundary, stage, step, micro_batch
        place = None if step is None else f"step {step}, micro-batch {micro_batch} of stage {stage!r}"
        super().__init__(what, where=where or place, why=why, mend=mend)


class VerificationError(RunError):
    """A difference between the results of the plan and of the uncut model."""

    code = "NB-310"
    recurs = True
    usual_mend = "run nb.verify with micro_batch=1 and without nb.compress, to see which of them it is"


class CheckpointError(RunError):
    """A checkpoint that is damaged, or that does not match what is to be restored."""

    code = "NB-320"
    recurs = True
    usual_mend = "whale-nebula checkpoints verify FOLDER says which checkpoints are whole"


class TransportError(NebulaError):
    """A failure of communication between two workers."""

    code = "NB-400"
    usual_mend = "see that the other worker runs and that the network between them is up"


class LinkClosedError(TransportError):
    """A link that is closed."""

    code = "NB-401"
    usual_mend = "look at the output of the worker at the other end: it has ended"


class DeadlineError(TransportError):
    """A wait that exceeded its deadline; every wait has a deadline and a name."""

    code = "NB-402"
    usual_mend = "look at what the other side is doing, or allow more time: 'patience' in the config"


class WireError(TransportError):
    """Invalid bytes on a link; the two subclasses distinguish the side at fault."""

    code = "NB-410"
    usual_mend = "run the same version of this library in every cluster"


class LocalProtocolError(WireError):
    """A violation of the protocol by this side, before it was sent."""

    code = "NB-411"
    usual_mend = "report this: no script should be able to bring it about"


class RemoteProtocolError(WireError):
    """A violation of the protocol by the other side: another version, a broken line, or an attack."""

    code = "NB-412"
    usual_mend = "run the same version of this library in every cluster, and look at the line between them"


class DamagedFrameError(RemoteProtocolError):
    """A frame that was damaged in transmission: the link reconnects and the frame is retransmitted."""

    code = "NB-413"
    usual_mend = "look at the line and at what relays it: TCP alone lets such damage through rarely"


class PeerRestartedError(RemoteProtocolError):
    """A worker that was replaced by another process, without the state of this run."""

    code = "NB-414"
    usual_mend = "start all workers again, from the last checkpoint"


class EpochOverError(RemoteProtocolError):
    """A process whose run was restarted without it: its work belongs to an earlier epoch."""

    code = "NB-415"
    usual_mend = "end this process: whale-nebula run --restarts starts one of the run's epoch in its place"


class StaleWorkerError(RemoteProtocolError):
    """A worker at the other end from an earlier epoch, which is refused. A `fresh` one has no session."""

    code, fresh = "NB-416", False
    usual_mend = "end what is left of an earlier epoch at the other end, and start its worker again"


class OtherWorkersError(RemoteProtocolError):
    """Clusters with other numbers of workers (`counts`) than this process has; it must be restarted."""

    code = "NB-417"
    counts: Mapping[str, int] = MappingProxyType({})
    usual_mend = "start this worker again: whale-nebula run does so by itself"


class IdentityError(TransportError):
    """A certificate or a role that may not use a link. Retrying does not help.

    >>> issubclass(ExpiredError, IdentityError), ExpiredError("the certificate of gpu/0 has expired").mend
    (True, 'whale-nebula certs renew, where the authority is; then copy the new certificate to its host')
    """

    code = "NB-420"
    recurs = True
    usual_mend = "whale-nebula certs show, and whale-nebula doctor --config clusters.yaml on both sides"


class WrongAuthorityError(IdentityError):
    """A certificate signed by another authority than the one in `ca`."""

    code = "NB-421"
    usual_mend = "give every cluster the same ca.pem, and certificates that were issued beside it"


class SelfSignedError(IdentityError):
    """A self-signed certificate."""

    code = "NB-422"
    usual_mend = "whale-nebula certs issue, where the authority is, and use what it made"


class ExpiredError(IdentityError):
    """A certificate outside its dates, or a wrong clock."""

    code = "NB-423"
    usual_mend = "whale-nebula certs renew, where the authority is; then copy the new certificate to its host"


class WrongNameError(IdentityError):
    """A certificate of another identity than expected."""

    code = "NB-424"
    usual_mend = "compare the addresses in clusters.yaml with the certificates: whale-nebula certs show"


class NoCertificateError(IdentityError):
    """A side that presents no certificate."""

    code = "NB-425"
    usual_mend = "security: {ca: certs/ca.pem, cert: ..., key: ...} in its clusters.yaml, without insecure: true"


class PlaintextError(IdentityError):
    """A side that connects without TLS while the other requires it."""

    code = "NB-426"
    usual_mend = "take insecure: true out of clusters.yaml; both sides must have the same"


class RevokedError(IdentityError):
    """A certificate that is on the deny list."""

    code = "NB-427"
    usual_mend = "whale-nebula certs issue makes a new one, if its owner may have one"


class CredentialsError(IdentityError):
    """Files of certificates and keys that are missing, readable by others, or not a pair."""

    code = "NB-428"
    usual_mend = "whale-nebula certs issue, once certs init has made an authority: it prints which files go where"


class NotAllowedError(IdentityError):
    """A call that a role may not make; only calls on its list are allowed."""

    code = "NB-429"
    usual_mend = "issue a certificate of the role that may: whale-nebula certs issue --role ..."


class AccountError(NebulaError):
    """An invalid account, or an invalid registry of accounts."""

    code, recurs = "NB-431", True
    usual_mend = "whale-nebula accounts --help"


class LoginError(AccountError):
    """A refused login. The reason is not sent to the client: `reason` is for the owner's log."""

    code, reason = "NB-432", ""
    usual_mend = "try again in some minutes, or ask the owner of the cluster"


class AccessError(NebulaError):
    """A refused read of an owner's data: not granted, over its limits, expired, or an invalid request."""

    code, recurs = "NB-433", True
    usual_mend = "whale-nebula data request gpu://NAME --purpose TEXT, or ask the owner of the data"


class InterfaceError(NebulaError):
    """A dataset whose rows, files or functions do not match its published interface; none of it is sent."""

    code, recurs = "NB-434", True
    usual_mend = "mend what the interface names, then: whale-nebula data publish FILE"


class AuditError(TransportError):
    """An audit log that was changed, or that cannot be written."""

    code = "NB-430"
    usual_mend = "whale-nebula audit verify FILE names the first record that is wrong"


class ConfigError(NebulaError):
    """A mistake in clusters.yaml, its dict, or the environment."""

    code = "NB-500"
    recurs = True
    usual_mend = "compare with the README's example of clusters.yaml"


class VersionError(ConfigError):
    """An unsupported version of TensorFlow or Keras."""

    code = "NB-501"
    usual_mend = "pip install whale-nebula brings the versions that fit"
