"""The user's model: its recipe, the live module, its flat vector of parameters, its loss.

May import: ``codec``, ``process`` and ``usercode``. Must not know: Spark, slices, rows of a DataFrame.
"""
