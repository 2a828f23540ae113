"""Messages between neighbours of a pipeline on one node, through memory that both map.

[Note: near messages] Gloo carries a message through a thread at either end, which wakes up while a rank
computes on that core, and then wakes the rank; on two cores a small pipeline waits for this more than
for the bytes. Here the sender copies a tensor into memory that both ranks map, and says so by one byte
on a socket, from which the other reads when it wants the tensor: nobody else wakes up. Torch's
schedules do not notice: to them it is a process group, by torch's interface for other backends.

Memory and sockets have no names once the ranks are connected, so that nothing is left of ranks that are
killed, and a rank whose neighbour is gone is told at once. What is larger than a slot, or goes to
another than a neighbour, goes by Gloo, and so does everything where ranks are on several nodes or on
GPUs.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

SLOTS, SLOT_BYTES = 8, 1 << 20
"""Of each direction. What was never written to takes no memory."""
MESSAGE, FREE = b"m", b"f"
"""What the bytes on a socket say: there is a message; half of the slots may be written again."""
BACKEND = "sparkdl-near"


def near_group(ranks: Sequence[int], carried: dist.ProcessGroup, folder: Path) -> dist.ProcessGroup:
    """A group of ``ranks``, in ascending order, which are on this node and all call this. ``carried``:
    their Gloo group; ``folder``: private, and seen by all."""
    dist.Backend.register_backend(BACKEND, NearGroup, devices=["cpu"])
    group = dist.new_group(list(ranks), backend=BACKEND, use_local_synchronization=True)
    assert isinstance(group, NearGroup)
    group.connect(carried, folder)
    return group


class Line:
    """This end of a line to rank ``other``: what is sent comes in this order."""

    def __init__(self, channel: socket.socket, other: int) -> None:
        self._channel, self._other = channel, other
        own = os.memfd_create("sparkdl-near", os.MFD_CLOEXEC)
        os.ftruncate(own, SLOTS * SLOT_BYTES)
        try:
            socket.send_fds(channel, [FREE], [own])
            _, theirs, _, _ = socket.recv_fds(channel, 1, 1)
        except OSError as error:
            os.close(own)
            raise self._gone(error) from error
        self._out = _mapped(own)
        if not theirs:
            raise self._gone("it has ended")
        (self._in,) = map(_mapped, theirs)
        self._sent = self._taken = 0
        self._free, self._here = SLOTS, 0
        self._unsent: deque[torch.Tensor] = deque()
        self._asked: deque[Receiving] = deque()

    def send(self, tensor: torch.Tensor) -> Sending:
        """It is copied at once, if there is room."""
        self._unsent.append(tensor.detach())
        self._flush()
        return Sending(self, self._sent + len(self._unsent))

    def receive(self, tensor: torch.Tensor) -> Receiving:
        self._asked.append(Receiving(self, tensor))
        return self._asked[-1]

    def has_sent(self, number: int) -> None:
        """Wait until so many messages are sent."""
        while self._sent < number:
            self._read()
            self._flush()

    def take_until(self, wanted: Receiving) -> None:
        """Wait until all that was asked for is here, this one the last."""
        while not wanted.done:
            while not self._here:
                self._read()
                self._flush()
            self._take(self._asked.popleft())

    def close(self) -> None:
        self._channel.close()

    def _flush(self) -> None:
        """Send what there is room for."""
        while self._unsent and self._free:
            tensor = self._unsent.popleft()
            _as(self._out[self._sent % SLOTS], tensor).copy_(tensor)
            self._sent, self._free = self._sent + 1, self._free - 1
            try:
                self._channel.sendall(MESSAGE)
            except OSError as error:
                raise self._gone(error) from error

    def _take(self, receiving: Receiving) -> None:
        tensor = receiving.tensor.detach()
        tensor.copy_(_as(self._in[self._taken % SLOTS], tensor))
        receiving.done = True
        self._taken, self._here = self._taken + 1, self._here - 1
        if self._taken % (SLOTS // 2) == 0:
            with contextlib.suppress(OSError):  # who has ended sends no more
                self._channel.sendall(FREE)

    def _read(self) -> None:
        """Wait for what the other end says."""
        try:
            said = self._channel.recv(4096)
        except OSError as error:
            raise self._gone(error) from error
        if not said:
            raise self._gone("it has ended")
        self._here += said.count(MESSAGE)
        self._free += said.count(FREE) * (SLOTS // 2)

    def _gone(self, why: object) -> Exception:
        return dist.DistNetworkError(
            f"nothing comes from rank {self._other} of the pipeline: {why}"
        )


class Sending(dist.Work):
    """A message, until it is copied."""

    def __init__(self, line: Line, number: int) -> None:
        super().__init__()
        self._line, self._number = line, number

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        self._line.has_sent(self._number)
        return True


class Receiving(dist.Work):
    """A message that is wanted. ``done``: it is in ``tensor``."""

    def __init__(self, line: Line, tensor: torch.Tensor) -> None:
        super().__init__()
        self._line, self.tensor, self.done = line, tensor, False

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        self._line.take_until(self)
        return True


class NearGroup(dist.ProcessGroup):
    """A process group that knows messages from one rank to another, and nothing else."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as of a class in Python
        self._seconds = timeout.total_seconds()
        self._carried: dist.ProcessGroup | None = None
        self._lines: dict[int, Line] = {}

    def connect(self, carried: dist.ProcessGroup, folder: Path) -> None:
        """See :func:`near_group`."""
        self._carried = carried
        try:
            self._lines = connected(carried, folder, self._seconds)
        except OSError as error:
            raise dist.DistNetworkError(f"the ranks of a pipeline do not meet: {error}") from error

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """To rank ``dst`` of the group, one tensor."""
        line = self._line(dst, tensors[0])
        if line is not None:
            return line.send(tensors[0])
        assert self._carried is not None
        return self._carried.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Into one tensor, what rank ``src`` of the group sends."""
        line = self._line(src, tensors[0])
        if line is not None:
            return line.receive(tensors[0])
        assert self._carried is not None
        return self._carried.recv(tensors, src, tag)

    def _line(self, other: int, tensor: torch.Tensor) -> Line | None:
        """Both ends come to the same answer: the tensors of a message have one size."""
        return self._lines.get(other) if tensor.nbytes <= SLOT_BYTES else None

    def shutdown(self) -> None:
        """Neighbours that wait for something are told."""
        for line in self._lines.values():
            line.close()
        self._lines, self._carried = {}, None

    def getBackendName(self) -> str:  # torch's name
        return BACKEND


def connected(carried: dist.ProcessGroup, folder: Path, seconds: float) -> dict[int, Line]:
    """To the rank before this one and to that after it, by rank. All ranks of ``carried`` call this."""
    rank, size = dist.get_rank(carried), dist.get_world_size(carried)
    around = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as at_end:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        at_end.callback(os.close, place)

        def address(name: torch.Tensor) -> str:
            """A socket's path may have 107 letters, and a folder's more."""
            return f"/proc/self/fd/{place}/near-{int(name):x}"

        server = at_end.enter_context(socket.socket(socket.AF_UNIX))
        server.settimeout(seconds)
        own = torch.tensor([secrets.randbits(62)])
        server.bind(address(own))
        at_end.callback(os.unlink, address(own))
        server.listen(size)
        names = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(names, own, carried)
        for other in around:
            if other < rank:
                sockets[other] = socket.socket(socket.AF_UNIX)
                sockets[other].connect(address(names[other]))
                sockets[other].sendall(rank.to_bytes(4, "big"))
        while len(sockets) < len(around):
            accepted, _ = server.accept()
            came = accepted.recv(4, socket.MSG_WAITALL)
            if len(came) < 4:
                raise ConnectionError("a neighbour has ended")
            sockets[int.from_bytes(came, "big")] = accepted
    for channel in sockets.values():
        channel.settimeout(seconds)
    return {other: Line(sockets[other], other) for other in around}


def _mapped(descriptor: int) -> list[torch.Tensor]:
    """The slots in this memory, bytes."""
    memory = mmap.mmap(descriptor, SLOTS * SLOT_BYTES)
    os.close(descriptor)
    return list(torch.frombuffer(memory, dtype=torch.uint8).view(SLOTS, SLOT_BYTES))


def _as(slot: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The beginning of a slot as a tensor of this shape and dtype."""
    return slot[: like.nbytes].view(like.dtype).view(like.shape)
