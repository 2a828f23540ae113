"""The care for a user's mistakes before iteration 1: a dry run on a few rows, and words for what fails.

May import: every room below. Must not know: ``Trainer``, the order of a fit.
"""
