"""What the results of a process depend on, and what its operating system offers.

Seeded random generators, torch's threads and default settings, memory, and the differences between
Linux and macOS.

May import: ``sparkdl.errors``. Must not know: Spark, models, samples.
"""
