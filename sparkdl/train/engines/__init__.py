"""The engines behind one trainer: shuffle, gang and local, and what brings them back after a loss."""
