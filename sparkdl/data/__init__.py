"""From a DataFrame or an RDD to mini-batches of tensors."""

from sparkdl.data.samples import Sample

__all__ = ["Sample"]
