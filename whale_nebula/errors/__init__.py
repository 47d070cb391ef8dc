"""All errors and warnings, as one tree: a class for each cause.

Every error has four parts: *what* happened, *where*, *why*, and the *mend*: how to fix it. Without a mend,
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
    """A feature that the API names but that is not implemented yet; it never falls back to another one.

    >>> error = NotYetError("nb.split")
    >>> error.feature, error.what
    ('nb.split', 'nb.split is not implemented yet')
    """

    code = "NB-001"
    recurs = True
    usual_mend = "remove it; docs/scripts.md lists what is supported"

    def __init__(
        self, feature: str, *, where: str | None = None, why: str | None = None, mend: str | None = None
    ) -> None:
        what = feature if MEND in feature else f"{feature} is not implemented yet"
        super().__init__(what, where=where, why=why, mend=mend)
        self.feature = feature

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.feature,), self.__dict__


class ScopeError(NebulaError):
    """Invalid use of scopes."""

    code = "NB-100"
    recurs = True
    usual_mend = "put the layers of each stage in a 'with nb.stage(...):' block"


class NestingError(ScopeError):
    """A scope nested in a scope that must not contain it."""

    code = "NB-101"
    usual_mend = "nest scopes as cluster > replica > pipeline > stage > split, each at most once"


class StageOrderError(ScopeError):
    """A later stage whose output feeds an earlier one."""

    code = "NB-102"
    usual_mend = "give the second part a different name: nb.stage(cluster=..., name=...)"


class StageIdentityError(ScopeError):
    """Two stages that cannot be distinguished, or a stage with two definitions."""

    code = "NB-103"
    usual_mend = "give each stage a unique name: nb.stage(cluster=..., name=...)"


class OptionError(ScopeError):
    """An option that does not exist, or an invalid value of one."""

    code = "NB-104"
    usual_mend = "see help(nb.cluster), help(nb.pipeline) ... for the valid options"


class CaptureError(NebulaError):
    """A step that cannot be captured."""

    code = "NB-200"
    recurs = True
    usual_mend = "run the step without scopes; if that works, report this error with the script"


class BatchAxisError(CaptureError):
    """Inputs that cannot be divided along one batch axis."""

    code = "NB-201"
    usual_mend = "name the inputs that are not batches: @nb.function(whole=('table',)), or use micro_batch=1"


class StaticBatchError(CaptureError):
    """A batch size that is a constant in the model."""

    code = "NB-202"
    usual_mend = "replace the constant number of rows with tf.shape(x)[0] or -1"


class GradientError(CaptureError):
    """A gradient request that cannot be fulfilled."""

    code = "NB-203"
    usual_mend = "compute gradients with tape.gradient(loss, variables) inside the step"


class BoundaryInBodyError(CaptureError):
    """A scope inside a loop, a branch or a nested function, where no boundary is possible."""

    code = "NB-204"
    usual_mend = "enter the scope around the loop, the branch or the nested tf.function"


class BatchCoupledError(CaptureError):
    """A batch that would be divided although its rows depend on each other.

    `op` and `line` identify the operation that couples them; `mends` are the possible fixes.

    >>> error = BatchCoupledError("the loss couples the rows of a batch", op="loss/MatMul", line="train.py:7")
    >>> error.where
    'loss/MatMul, train.py:7'
    """

    code = "NB-205"
    usual_mends: ClassVar[tuple[str, ...]] = (
        "nb.pipeline(micro_batch=1)",
        "nb.loss_weight(t), if the loss is a mean over t",
        'nb.pipeline(..., coupled="allow"), which computes it for each micro-batch separately',
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
    """An unsupported setting of TensorFlow or Keras; it is refused rather than ignored."""

    code = "NB-206"
    usual_mend = "remove the setting, or remove the scopes"


class DataDependentError(CaptureError):
    """Python code (`if`, `for`, `float()`, NumPy) that needs a tensor's value while the step is traced."""

    code = "NB-207"
    usual_mend = "use TensorFlow operations instead: tf.cond, tf.where, tf.while_loop, tf.map_fn"


class PlanError(NebulaError):
    """A program that cannot be planned."""

    code = "NB-210"
    recurs = True
    usual_mend = "print nb.plan(model, *example).to_text() to see the part that can be planned"


class PlanMismatchError(PlanError):
    """Programs or plans that differ between two workers, or between a step and its pin; the message names the first
    difference.
    """

    code = "NB-211"
    usual_mend = "run the same script with the same versions and thread counts in every cluster"


class PlacementError(PlanError):
    """An op, variable or layer that has no place, or more than one."""

    code = "NB-212"
    usual_mend = "assign it to a cluster: nb.stage(cluster=...)"


class ForbiddenCrossingError(PlanError):
    """A step that would send a cluster data derived from an input that the config forbids there."""

    code = "NB-213"
    usual_mend = "keep the stages that read the input in its own cluster, or allow the transfer in the config"


class NotApprovedError(PlanError):
    """A program that the owner of this cluster has not approved; the message names the first difference."""

    code = "NB-214"
    usual_mend = "on the host with the authority's key, run: whale-nebula approve SCRIPT --config clusters.yaml"


class DataError(NebulaError):
    """Invalid training text or vocabulary: files that are missing or do not match each other.

    >>> print(DataError("train.en has an empty sentence", where="train.en.gz:17", mend='empty="skip"'))
    NB-220 train.en has an empty sentence (train.en.gz:17)
      mend: empty="skip"
    """

    code = "NB-220"
    recurs = True
    usual_mend = "inspect the file named above, for example with wc -l and head"


class WeightsError(NebulaError):
    """An invalid folder of trained weights: files or tensors are missing, or do not match the model."""

    code = "NB-221"
    recurs = True
    usual_mend = "use model.safetensors, config.json and vocab.txt of the same model"


class RunError(NebulaError):
    """A run that cannot continue."""

    code = "NB-300"
    usual_mend = "restart the run"


class StageFailedError(RunError):
    """An exception raised by the user's model inside a stage.

    `torn` is true if an update had begun: if not, variables, metrics and seeds are as before the step.

    >>> error = StageFailedError("division by zero", stage="decoder", micro_batch=2)
    >>> print(error)
    NB-301 division by zero (stage 'decoder', phase 0, micro-batch 2)
      why: nothing was updated: variables, metrics and seeds are as they were before the step
      mend: fix the exception in the stage, and run the step again
    """

    code = "NB-301"
    usual_mend = "fix the exception in the stage, and run the step again"
    torn_mend = "fix the exception in the stage, and restart from a checkpoint"

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
            state = "the step is torn: some variables were updated, and others were not"
        parts = [f"stage {stage!r}"] * bool(stage) + [f"phase {phase}"]
        parts += [] if micro_batch is None else [f"micro-batch {micro_batch}"]
        mend = mend or (self.torn_mend if torn else None)
        super().__init__(what, where=where or ", ".join(parts), why=why or state, mend=mend)


class RemoteFailureError(RunError):
    """A failure of another worker that stopped this one. `cause` is the code of its error, if it is one of these."""

    code = "NB-302"
    cause: str = ""
    usual_mend = "fix the failure of that worker, and restart all workers"


class CollectiveReadError(RunError):
    """A read, by a single process, of a value that another cluster holds."""

    code = "NB-303"
    recurs = True
    usual_mend = "make the call in every process: get_weights, save, evaluate and predict are collective calls"


class InputMismatchError(RunError):
    """Clusters that received different batches in the same step."""

    code = "NB-304"
    recurs = True
    usual_mend = "use fit(shuffle=False), or set a seed: dataset.shuffle(n, seed=...)"


class StateError(RunError):
    """A call at the wrong time."""

    code = "NB-305"
    recurs = True
    usual_mend = "call nb.shutdown() to end a run and nb.init(...) to begin one, never while a step runs"


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
      mend: find the op: tf.debugging.enable_check_numerics(); or skip such steps: nb.compress(..., nonfinite="skip")
    """

    code = "NB-307"
    usual_mend = (
        'find the op: tf.debugging.enable_check_numerics(); or skip such steps: nb.compress(..., nonfinite="skip")'
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
    usual_mend = "run nb.verify with micro_batch=1 and without nb.compress, to find the cause"


class CheckpointError(RunError):
    """A checkpoint that is damaged, or that does not match the state to restore."""

    code = "NB-320"
    recurs = True
    usual_mend = "list the complete checkpoints: whale-nebula checkpoints verify FOLDER"


class TransportError(NebulaError):
    """A failure of communication between two workers."""

    code = "NB-400"
    usual_mend = "check that the other worker is running and that the network between the two works"


class LinkClosedError(TransportError):
    """A link that is closed."""

    code = "NB-401"
    usual_mend = "check the output of the worker at the other end: it has exited"


class DeadlineError(TransportError):
    """A wait that exceeded its deadline; every wait has a deadline and a name."""

    code = "NB-402"
    usual_mend = "check what the other side is doing, or increase 'patience' in the config"


class WireError(TransportError):
    """Invalid bytes on a link; the subclasses distinguish the side at fault."""

    code = "NB-410"
    usual_mend = "run the same version of this library in every cluster"


class LocalProtocolError(WireError):
    """A violation of the protocol by this side, before it was sent."""

    code = "NB-411"
    usual_mend = "report this as a bug: no script should be able to cause it"


class RemoteProtocolError(WireError):
    """A violation of the protocol by the other side: a different version, a faulty link, or an attack."""

    code = "NB-412"
    usual_mend = "run the same version of this library in every cluster, and check the link between them"


class DamagedFrameError(RemoteProtocolError):
    """A frame that was damaged in transmission: the link reconnects and the frame is retransmitted."""

    code = "NB-413"
    usual_mend = "check the link and any relay on it: such damage rarely passes the checksums of TCP"


class PeerRestartedError(RemoteProtocolError):
    """A worker that was replaced by another process, without the state of this run."""

    code = "NB-414"
    usual_mend = "restart all workers from the last checkpoint"


class EpochOverError(RemoteProtocolError):
    """A process of an earlier epoch: the run was restarted without it."""

    code = "NB-415"
    usual_mend = "stop this process: whale-nebula run --restarts starts a replacement in the current epoch"


class StaleWorkerError(RemoteProtocolError):
    """A worker of an earlier epoch at the other end; it is refused. A `fresh` one has no session. It may also know of
    other absent workers; if this worker is `absent` for it, it lets this one take part after a step.
    """

    code, fresh, absent = "NB-416", False, False
    usual_mend = "stop the processes of the earlier epoch at the other end, and restart its worker"


class OtherWorkersError(RemoteProtocolError):
    """Other workers than this process was started with have left or joined (`counts` by worker: 0 or 1); it must be
    restarted.
    """

    code = "NB-417"
    counts: Mapping[str, int] = MappingProxyType({})
    usual_mend = "restart this worker; whale-nebula run does so automatically"


class IdentityError(TransportError):
    """A certificate or a role that is not permitted on a link. Retrying does not help.

    >>> issubclass(ExpiredError, IdentityError), ExpiredError("the certificate of gpu/0 has expired").mend
    (True, 'on the host with the authority, run: whale-nebula certs renew; then copy the certificate to its host')
    """

    code = "NB-420"
    recurs = True
    usual_mend = "run whale-nebula certs show, and whale-nebula doctor --config clusters.yaml on both sides"


class WrongAuthorityError(IdentityError):
    """A certificate signed by a different authority from the one in `ca`."""

    code = "NB-421"
    usual_mend = "copy the same ca.pem to every cluster, and use certificates that this authority issued"


class SelfSignedError(IdentityError):
    """A self-signed certificate."""

    code = "NB-422"
    usual_mend = "on the host with the authority, run whale-nebula certs issue, and use that certificate"


class ExpiredError(IdentityError):
    """A certificate that has expired or is not valid yet, or a wrong clock."""

    code = "NB-423"
    usual_mend = "on the host with the authority, run: whale-nebula certs renew; then copy the certificate to its host"


class WrongNameError(IdentityError):
    """A certificate that names a different identity from the expected one."""

    code = "NB-424"
    usual_mend = "compare the addresses in clusters.yaml with the output of whale-nebula certs show"


class NoCertificateError(IdentityError):
    """A side that presents no certificate."""

    code = "NB-425"
    usual_mend = "in its clusters.yaml, set security: {ca: certs/ca.pem, cert: ..., key: ...}, without insecure: true"


class PlaintextError(IdentityError):
    """A side that connects without TLS although the other side requires it."""

    code = "NB-426"
    usual_mend = "remove insecure: true from clusters.yaml; both sides need the same setting"


class RevokedError(IdentityError):
    """A certificate on the deny list."""

    code = "NB-427"
    usual_mend = "if its owner may have a new certificate, run whale-nebula certs issue"


class CredentialsError(IdentityError):
    """Certificate or key files that are missing, readable by other users, or not a pair."""

    code = "NB-428"
    usual_mend = (
        "whale-nebula certs init --config clusters.yaml, if there is no authority, then "
        "whale-nebula certs issue --all --config clusters.yaml; copy the files that it lists"
    )


class NotAllowedError(IdentityError):
    """A call that the caller's role does not permit."""

    code = "NB-429"
    usual_mend = "issue a certificate with a role that permits the call: whale-nebula certs issue --role ..."


class AccountError(NebulaError):
    """An invalid account or registry of accounts."""

    code, recurs = "NB-431", True
    usual_mend = "see whale-nebula accounts --help"


class LoginError(AccountError):
    """A refused login. The reason is not sent to the client: `reason` is for the owner's log."""

    code, reason = "NB-432", ""
    usual_mend = "try again in a few minutes, or ask the owner of the cluster"


class AccessError(NebulaError):
    """A refused read of an owner's data: it is not granted, exceeds its limits, has expired, or is invalid."""

    code, recurs = "NB-433", True
    usual_mend = "run whale-nebula data request gpu://NAME --purpose TEXT, or ask the owner of the data"


class InterfaceError(NebulaError):
    """A dataset whose rows, files or functions do not match its published interface; no data is sent."""

    code, recurs = "NB-434", True
    usual_mend = "fix the dataset or its interface, then run: whale-nebula data publish FILE"


class AuditError(TransportError):
    """An audit log that was modified, or that cannot be written."""

    code = "NB-430"
    usual_mend = "find the first wrong record: whale-nebula audit verify FILE"


class ConfigError(NebulaError):
    """A mistake in clusters.yaml, in the equivalent dict, or in the environment."""

    code = "NB-500"
    recurs = True
    usual_mend = "compare with the example in docs/clusters-yaml.md"


class VersionError(ConfigError):
    """An unsupported version of TensorFlow or Keras."""

    code = "NB-501"
    usual_mend = "install the supported versions: pip install whale-nebula"
