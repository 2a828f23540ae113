"""One replica in one iteration: mini-batch, forward, backward, and the sections that it sends to
slices.

May import: ``slices``, ``metrics``, ``model``, ``data`` and ``slab``. Must not know: Spark, other
replicas, engines.
"""
