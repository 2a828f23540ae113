"""Values and tensors as bytes, JSON, files and text.

Two forms of tensors and two kinds of trust: :mod:`sparkdl.codec.packed` for what this application
wrote and reads again, :mod:`sparkdl.codec.safe` for what lies on disk or comes from elsewhere.

May import: ``process``. Must not know: Spark, and what the values mean.
"""
