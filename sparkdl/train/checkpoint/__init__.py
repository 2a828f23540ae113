"""Checkpoints: settings, slices as safetensors, file systems, the manifest, the store."""

from sparkdl.train.checkpoint.settings import Checkpoint

__all__ = ["Checkpoint"]
