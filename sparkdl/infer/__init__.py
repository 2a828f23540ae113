"""Trained models: prediction, evaluation, saving and loading; and predictions with any other model.

May import: ``data``, ``metrics``, ``model``, ``spark``, ``replica``, ``checkpoint`` and
``loop.history``. Must not know: ``Trainer``, engines.
"""
