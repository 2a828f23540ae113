"""How the columns of a DataFrame become tensors, a file for each type of column."""
