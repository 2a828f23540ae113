"""Helpers around Spark: RDDs of raw bytes, jobs, messages to tasks, executors, timeouts, failures.

This package may import ``process``, ``session``, ``settings`` and ``errors``. It must not know
samples, models or training.
"""
