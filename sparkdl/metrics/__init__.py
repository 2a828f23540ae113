"""Figures of merit as states that merge, so that any cut into batches gives the same value.

May import: ``model``. Must not know: Spark, partitions.
"""
