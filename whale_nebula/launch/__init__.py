"""Start the workers of a run, watch them, end them; and, in a worker, find out which one it is."""

from whale_nebula.launch.attach import Attachment, attach
from whale_nebula.launch.identity import SecurityFiles
from whale_nebula.launch.job import Job, Outcome, Result
from whale_nebula.launch.spawn import spawn

__all__ = ["Attachment", "Job", "Outcome", "Result", "SecurityFiles", "attach", "spawn"]
