"""The strategies of a rank: ``ddp``, ``fsdp``, ``tensor`` and ``pipeline``."""
