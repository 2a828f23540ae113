"""From a DataFrame or an RDD to mini-batches of tensors."""

from sparkdl.data.columns import Convert, Image, Sequence
from sparkdl.data.records import Sample

__all__ = ["Convert", "Image", "Sample", "Sequence"]
