"""The gang engine, which runs iterations on the ranks of a barrier stage with ``torch.distributed``."""
