"""A copy of the model: its recipe, its flat vector, and the live module of a process."""
