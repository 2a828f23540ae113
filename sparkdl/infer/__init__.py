"""Trained models: predict, evaluate, save, load.

May import: ``data``, ``metrics``, ``model``, ``spark``, ``replica``, ``checkpoint`` and
``loop.history``. Must not know: ``Trainer``, engines.
"""
