"""The engines, which run iterations in this process, as Spark jobs, or on the ranks of a gang.

An engine may import every package below this one. It must not know ``Trainer``, checkpoint files or
the user's DataFrames. No engine imports another.
"""
