"""Messages between neighbours of a pipeline on one node, through shared memory.

[Note: near messages] Gloo carries a message through a thread at either end. The thread wakes up
while a rank computes on its core, and then wakes the rank. On two cores a small pipeline waits
longer for this than for the bytes. Here the sender copies a tensor into memory that both ranks map,
and writes one byte to a socket. The receiver reads from the socket when it needs the tensor, so no
other thread wakes up. To torch's schedules this is an ordinary process group, which uses torch's
interface for third-party backends.

Once the ranks are connected, the memory and the sockets have no names. So ranks that are killed leave
nothing behind, and a rank notices at once when its neighbour has ended. Messages that are larger than a
slot, or not between neighbours, go through Gloo. So does everything if ranks are on several nodes or on
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
"""The slots for each direction and their size. Pages that were never written to take no memory."""
MESSAGE, FREE = b"m", b"f"
"""The bytes on a socket: there is a new message; half of the slots are free again."""
BACKEND = "sparkdl-near"


def near_group(ranks: Sequence[int], carried: dist.ProcessGroup, folder: Path) -> dist.ProcessGroup:
    """Create a process group of ranks on this node, all of which call this function.

    Args:
        ranks: The ranks, in ascending order.
        carried: Their Gloo group.
        folder: A private directory that all of them see.
    """
    dist.Backend.register_backend(BACKEND, NearGroup, devices=["cpu"])
    group = dist.new_group(list(ranks), backend=BACKEND, use_local_synchronization=True)
    assert isinstance(group, NearGroup)
    group.connect(carried, folder)
    return group


class Line:
    """One end of a connection to rank ``other``, which delivers messages in order."""

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
        """Send a tensor. It is copied at once if there is room."""
        self._unsent.append(tensor.detach())
        self._flush()
        return Sending(self, self._sent + len(self._unsent))

    def receive(self, tensor: torch.Tensor) -> Receiving:
        self._asked.append(Receiving(self, tensor))
        return self._asked[-1]

    def has_sent(self, number: int) -> None:
        """Wait until ``number`` messages have been sent."""
        while self._sent < number:
            self._read()
            self._flush()

    def take_until(self, wanted: Receiving) -> None:
        """Wait for all receives that were requested up to and including ``wanted``."""
        while not wanted.done:
            while not self._here:
                self._read()
                self._flush()
            self._take(self._asked.popleft())

    def close(self) -> None:
        self._channel.close()

    def _flush(self) -> None:
        """Send as many messages as there are free slots."""
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
        receiving.note_done()
        self._taken, self._here = self._taken + 1, self._here - 1
        if self._taken % (SLOTS // 2) == 0:
            with contextlib.suppress(OSError):  # a neighbour that has ended sends nothing more
                self._channel.sendall(FREE)

    def _read(self) -> None:
        """Wait for a byte from the other end."""
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
    """A message that is being sent. It is sent once it has been copied."""

    def __init__(self, line: Line, number: int) -> None:
        super().__init__()
        self._line, self._number = line, number

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        self._line.has_sent(self._number)
        return True


class Receiving(dist.Work):
    """A message that is expected.

    ``done`` is True once it is in ``tensor``.
    """

    def __init__(self, line: Line, tensor: torch.Tensor) -> None:
        super().__init__()
        self._line, self.tensor, self.done = line, tensor, False

    def note_done(self) -> None:
        """Note that the message is in ``tensor``."""
        self.done = True

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        self._line.take_until(self)
        return True


class NearGroup(dist.ProcessGroup):
    """A process group that supports only messages from one rank to another."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the signature for Python subclasses
        self._seconds = timeout.total_seconds()
        self._carried: dist.ProcessGroup | None = None
        self._lines: dict[int, Line] = {}

    def connect(self, carried: dist.ProcessGroup, folder: Path) -> None:
        """Connect to the neighbours. See :func:`near_group`."""
        self._carried = carried
        try:
            self._lines = connected(carried, folder, self._seconds)
        except OSError as error:
            raise dist.DistNetworkError(f"the ranks of a pipeline do not meet: {error}") from error

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send a list of one tensor to rank ``dst`` of the group."""
        line = self._line(dst, tensors[0])
        if line is not None:
            return line.send(tensors[0])
        assert self._carried is not None
        return self._carried.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Receive a list of one tensor from rank ``src`` of the group."""
        line = self._line(src, tensors[0])
        if line is not None:
            return line.receive(tensors[0])
        assert self._carried is not None
        return self._carried.recv(tensors, src, tag)

    def _line(self, other: int, tensor: torch.Tensor) -> Line | None:
        """Return the line for a message, or None if Gloo carries it.

        Both ends decide the same, because they see tensors of the same size.
        """
        return self._lines.get(other) if tensor.nbytes <= SLOT_BYTES else None

    def shutdown(self) -> None:
        """Close the lines, which neighbours that wait will notice."""
        for line in self._lines.values():
            line.close()
        self._lines, self._carried = {}, None

    def getBackendName(self) -> str:  # torch requires this name
        return BACKEND


def connected(carried: dist.ProcessGroup, folder: Path, seconds: float) -> dict[int, Line]:
    """Connect this rank to the ranks before and after it. All ranks of ``carried`` call this function.

    Args:
        carried: The Gloo group of the ranks.
        folder: A private directory that all of them see.
        seconds: The time limit for each wait.

    Returns:
        The lines by rank.
    """
    rank, size = dist.get_rank(carried), dist.get_world_size(carried)
    around = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as at_end:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        at_end.callback(os.close, place)

        def address(name: torch.Tensor) -> str:
            """Return a path for a socket, at most 107 characters, which ``folder`` may exceed."""
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
    """Map this memory and return its slots as uint8 tensors."""
    memory = mmap.mmap(descriptor, SLOTS * SLOT_BYTES)
    os.close(descriptor)
    return list(torch.frombuffer(memory, dtype=torch.uint8).view(SLOTS, SLOT_BYTES))


def _as(slot: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the beginning of a slot as a tensor with the shape and dtype of ``like``."""
    return slot[: like.nbytes].view(like.dtype).view(like.shape)
