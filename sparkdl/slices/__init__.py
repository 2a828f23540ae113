"""The mathematics of a slice: sum the gradients, add penalties, clip, step the optimizer.

A slice is a range of the flat vector with its optimizer state. It is updated as one unit.

May import: ``model``, ``codec`` and ``process``. Must not know: Spark, slabs, where gradients come
from.
"""
