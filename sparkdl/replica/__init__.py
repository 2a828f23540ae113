"""One replica in one iteration: mini-batch, forward, backward, and what it sends to each slice.

May import: ``slices``, ``metrics``, ``model``, ``data`` and ``slab``. Must not know: Spark, other
replicas, engines.
"""
