"""The forward-backward job: replica and mini-batch to gradient."""
