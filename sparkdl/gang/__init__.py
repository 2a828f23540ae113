"""Ranks in a barrier stage that run the driver's commands: ``torch.distributed`` inside Spark.

May import: ``slab``, ``spark``, ``codec`` and ``collectives``. Must not know: models, samples,
training.
"""

from sparkdl.collectives.communicator import Communicator
from sparkdl.gang.run import run

__all__ = ["Communicator", "run"]
