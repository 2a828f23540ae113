"""Gangs: all ranks at once, and ``torch.distributed`` between them."""
