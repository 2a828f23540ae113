"""The conversion of a DataFrame's columns into tensors, a file for each type of column."""
