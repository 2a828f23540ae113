"""Using a trained module: predictions on DataFrames and RDDs, and metrics."""
