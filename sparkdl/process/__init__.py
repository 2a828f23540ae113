"""The settings that a process's results depend on, and the services of its operating system.

These are seeded random generators, torch's threads and default settings, memory, and the differences
between Linux and macOS.

This package may import ``sparkdl.errors``. It must not know about Spark, models or samples.
"""
