"""The training loop: state, triggers, callbacks, schedule, validation, history.

It defines the interface of an engine (:mod:`sparkdl.loop.engine`), and asks the engine for one
iteration after another.

May import: ``replica``, ``metrics`` and ``slices``. Must not know: Spark, ``Trainer``, which engine
runs.
"""
