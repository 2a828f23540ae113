"""Values and tensors as bytes, JSON, files and text.

There are two forms of tensors for two levels of trust: :mod:`sparkdl.codec.packed` for bytes that this
application wrote itself, :mod:`sparkdl.codec.safe` for bytes that lie on disk or come from elsewhere.

This package may import ``process``. It must not know about Spark or about the meaning of the values.
"""
