"""Fits in a session of Spark Connect: a client that cannot reach the executors, and a gang that its
rank 0 leads.

May import: ``train`` and every room below. Must not know: searches and estimators.
"""
