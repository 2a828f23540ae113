"""Durable state: what is written, where, and when.

May import: ``loop``, ``slices`` and ``codec``. Must not know: Spark, engines, ranks.
"""

from sparkdl.checkpoint.config import Checkpoint

__all__ = ["Checkpoint"]
