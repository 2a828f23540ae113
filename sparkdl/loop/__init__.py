"""The story of a run: state, triggers, callbacks, schedule, validation, history.

It defines what an engine is (:mod:`sparkdl.loop.engine`), and asks it for one iteration after
another.

May import: ``replica``, ``metrics`` and ``slices``. Must not know: Spark, ``Trainer``, which
engine runs.
"""
