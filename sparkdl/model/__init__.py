"""The user's model: its recipe, the live module, its flat vector of parameters, its loss.

This package may import ``codec``, ``process`` and ``usercode``. It must not know about Spark,
slices, or rows of a DataFrame.
"""
