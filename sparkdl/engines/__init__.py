"""How iterations run: in this process, as Spark jobs, or over the ranks of a gang.

May import: every room below it. Must not know: ``Trainer``, checkpoints as files, the user's
DataFrames. No engine imports another.
"""
