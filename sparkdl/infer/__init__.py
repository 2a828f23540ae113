"""Trained models: prediction, evaluation, saving and loading.

May import: ``data``, ``metrics``, ``model``, ``spark``, ``replica``, ``checkpoint`` and
``loop.history``. Must not know: ``Trainer``, engines.
"""
