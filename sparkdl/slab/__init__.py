"""Memory of a node that its processes share: directories of a run, and stamped buffers in them.

May import: ``process`` and ``errors``. Must not know: what lies in the buffers; Spark.
"""
