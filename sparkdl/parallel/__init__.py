"""How a model is divided over ranks, by data, layer, stage or shard: plans and checks.

May import: ``replica`` and ``model``. Must not know: process groups, Spark.
"""
