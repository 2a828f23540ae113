"""Metrics as states that merge, so that any cut of the data into batches gives the same value.

May import: ``model``. Must not know: Spark, partitions.
"""
