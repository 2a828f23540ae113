"""Iterations over the ranks of a barrier stage, by ``torch.distributed``."""
