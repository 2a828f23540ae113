"""Rows to mini-batches: columns, partitions in slabs, the order of rows, batches.

This package may import ``slab``, ``spark`` and ``codec``. It must not know about models or training.
"""

from sparkdl.data.records import Sample

__all__ = ["Sample"]
