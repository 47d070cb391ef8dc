"""Start, supervise and end the workers of a run, and identify this process among them."""

from whale_nebula.launch.attach import Attachment, attach
from whale_nebula.launch.job import Job, Outcome, Result
from whale_nebula.launch.worker_processes import spawn

__all__ = ["Attachment", "Job", "Outcome", "Result", "attach", "spawn"]
