"""Iterations as Spark jobs: a forward-backward job and a parameter-synchronization job."""
