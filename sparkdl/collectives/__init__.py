"""Algorithms between ranks: all-reduce, reduce-scatter, broadcast, and what they cost.

May import: ``errors``. Must not know: Spark, and how the ranks came to be.
"""
