"""Collective algorithms between ranks: all-reduce, reduce-scatter, broadcast, and their costs.

May import: ``errors``. Must not know: Spark, and how the ranks were started.
"""
