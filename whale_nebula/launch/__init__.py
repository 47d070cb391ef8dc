"""Starting the workers of a run, and, in a worker, finding out which one it is."""

from whale_nebula.launch.attach import Attachment, attach
from whale_nebula.launch.local import Job, Outcome, Result, spawn

__all__ = ["Attachment", "Job", "Outcome", "Result", "attach", "spawn"]
