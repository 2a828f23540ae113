"""Memory that the processes of a node share: directories of a run, with stamped buffers in them.

This package may import ``process`` and ``errors``. It must not know about Spark or about the content of
the buffers.
"""
