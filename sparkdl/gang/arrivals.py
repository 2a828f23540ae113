"""Which ranks make a gang: those of one job, the latest of each, and all of them."""

from __future__ import annotations

from sparkdl.gang.channel import Channel
from sparkdl.gang.rank_task import Introduction


class ArrivedRanks:
    """The ranks of job number ``job`` that have come."""

    def __init__(self, job: int, size: int) -> None:
        self._job, self._size = job, size
        self.come: dict[int, tuple[Channel, Introduction]] = {}

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self.come]

    @property
    def too_few(self) -> bool:
        """Whether the stage runs fewer ranks than a gang has."""
        return any(hello.ranks != self._size for _, hello in self.come.values())

    def admit(self, channel: Channel, hello: Introduction) -> None:
        """Of a rank that comes again, the later one counts."""
        known = self.come.get(hello.rank)
        if hello.job != self._job or (known and known[1].task > hello.task):
            channel.close()
            return
        if known:
            known[0].close()
        self.come[hello.rank] = channel, hello

    def disconnect(self) -> None:
        for channel, _ in self.come.values():
            channel.close()
