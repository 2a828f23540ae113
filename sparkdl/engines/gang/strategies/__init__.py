"""What a rank does for each strategy: ``ddp``, ``fsdp``, ``tensor`` and ``pipeline``."""
