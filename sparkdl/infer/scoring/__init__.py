"""Scoring with models that were never trained here: any module, file or folder, on a DataFrame."""
