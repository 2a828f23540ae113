"""The division of a model over ranks, by data, layer, pipeline stage or shard: plans and checks.

May import: ``replica`` and ``model``. Must not know: process groups, Spark.
"""
