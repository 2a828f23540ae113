"""The mathematics of a slice: sum the gradients, penalize, clip, step the optimizer.

A slice is a range of the flat vector with its optimizer state, updated as one.

May import: ``model``, ``codec`` and ``process``. Must not know: Spark, slabs, where gradients
come from.
"""
