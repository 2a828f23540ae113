"""Spark's machinery: RDDs of raw bytes, jobs, messages to tasks, executors, time limits, failures.

May import: ``process``, ``session``, ``settings`` and ``errors``. Must not know: samples, models,
training.
"""
