"""Rows to mini-batches: columns, partitions in slabs, the order of rows, batches.

May import: ``slab``, ``spark`` and ``codec``. Must not know: models, training.
"""

from sparkdl.data.columns.base import Convert, Image, Sequence
from sparkdl.data.record_tasks import Sample

__all__ = ["Convert", "Image", "Sample", "Sequence"]
