"""Consistency models: which version of the weights replicas compute on, and who takes the steps.

A model is one file here. The words that users know are exported by the package.
"""
