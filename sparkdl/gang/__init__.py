"""All ranks at once: ``torch.distributed`` inside a Spark barrier stage."""

from sparkdl.gang.run import run

__all__ = ["run"]
