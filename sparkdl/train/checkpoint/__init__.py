"""Checkpoints: settings, slices as safetensors, file systems, the manifest, the store."""
