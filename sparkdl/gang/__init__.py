"""All ranks at once: ``torch.distributed`` inside a Spark barrier stage."""

from sparkdl.gang.communicator import Communicator
from sparkdl.gang.run import run

__all__ = ["Communicator", "run"]
