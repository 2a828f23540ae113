"""The conversation of one client with the owners of a parameter server."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from sparkdl.collectives import arguments
from sparkdl.collectives.key_range import KeySpec, MakeOptimizer
from sparkdl.collectives.operation_order import Kind
from sparkdl.collectives.server import Server
from sparkdl.collectives.server_messages import ERRORS, Message, Request, ServerOptions
from sparkdl.collectives.words import Words, text_of, text_tensor
from sparkdl.errors import ParameterError, SparkdlError, StalledError, StateLostError

GRACE_SECONDS = 5.0
"""How much longer a client waits than the owner, whose error says more."""

Part = tuple[Sequence[int], Sequence[torch.Tensor]]
"""The numbers and tensors that an operation sends to a place."""


def connect(
    owners: Sequence[int],
    keys: dict[int, KeySpec],
    make: MakeOptimizer | None,
    options: ServerOptions,
) -> tuple[Client, Server | None]:
    """Make the process groups, and the server of this rank if it is an owner, on all ranks.

    The caller adds to ``keys`` before it initializes them.
    """
    limit = timedelta(seconds=options.timeout + GRACE_SECONDS)
    groups = [dist.new_group(backend="gloo", timeout=limit) for _ in range(2)]
    requests, replies = map(Words, groups)
    operations = None if options.replay is None else len(options.replay)
    text = f"{replace(options, replay=None)} of owners {owners}, {operations=}"
    try:
        arguments.compare(groups[0], text, 0, torch.device("cpu"))
    except ParameterError:
        requests.destroy()
        replies.destroy()
        raise
    server = None
    if requests.rank in owners:
        place = owners.index(requests.rank)
        server = Server(place, len(owners), requests, replies, keys, make, options)
        server.start()
    return Client(owners, requests, replies, server, limit), server


class Client:
    """One rank's end of the messages to all owners."""

    def __init__(
        self,
        owners: Sequence[int],
        requests: Words,
        replies: Words,
        server: Server | None,
        limit: timedelta,
    ) -> None:
        self.rank, self.closed = requests.rank, False
        self._owners, self._requests, self._replies = owners, requests, replies
        self._server, self._limit = server, limit
        self._posted: list[tuple[int, dist.Work]] = []
        self._lock, self._broken = threading.RLock(), ""
        self._box: queue.SimpleQueue[tuple[Sequence[int], list[torch.Tensor]]] = queue.SimpleQueue()

    @property
    def places(self) -> range:
        """Return the places of all owners."""
        return range(len(self._owners))

    def check_open(self) -> None:
        """Raise an error if the server is closed."""
        if self.closed:
            raise ParameterError("This ParameterServer is closed: make a new one.")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let one thread talk to the owners; after half a conversation nobody can any more."""
        with self._lock:
            self.check_open()
            if self._broken:
                raise StateLostError(f"This ParameterServer cannot go on: {self._broken}")
            try:
                yield
                self._settle()
            except BaseException as error:
                if not isinstance(error, SparkdlError):
                    self._broken = f"a call was interrupted by {type(error).__name__}."
                raise

    def operate(self, kind: Kind, keys: Sequence[int], parts: Mapping[int, Part]) -> None:
        """Wait for the turn of an operation, and send each of its places its part.

        The part of place 0, which gives the turn, travels with the question.
        """
        words, tensors = parts.get(0, ((), ()))
        places = [len(parts), *parts]
        self.send(0, Message.TURN, [kind, len(keys), *keys, *places, *words], tensors)
        positions = self.answer(0)
        for (place, (words, tensors)), position in zip(parts.items(), positions, strict=True):
            if place:
                self.send(place, Message[kind.name], [position, *words], tensors)

    def meet(self, text: str) -> list[int]:
        """Return when every rank has said the same text; for "close", return the order."""
        note = text_tensor(text)
        self.send(0, Message.MEET, [len(note)], [note])
        return self.answer(0)

    def send(
        self, place: int, kind: Message, words: Sequence[int], tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """Send a request to the owner at a place, which has it once it answers.

        Do not wait for it before: if the owner is lost meanwhile, Gloo may not end such a wait.
        """
        rank = self._owners[place]
        if rank == self.rank:
            assert self._server is not None
            own = [tensor.clone() for tensor in tensors]
            self._server.submit(Request(rank, kind, words, own, self._put_answer))
            return
        try:
            posted = self._requests.post(rank, [kind, *words], tensors)
            self._posted += [(rank, work) for work in posted]
        except (RuntimeError, ValueError) as error:
            raise self._lost(rank, error) from error

    def _settle(self) -> None:
        """Wait until everything has been sent."""
        while self._posted:
            rank, work = self._posted.pop()
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                raise self._lost(rank, error) from error

    def _put_answer(self, words: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Pass an answer of this rank's own server on, in memory that the server does not change."""
        self._box.put((words, [tensor.clone() for tensor in tensors]))

    def answers(self, wanted: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Receive the tensors of several places, also after an error of one of them."""
        errors = []
        for place, into in wanted.items():
            try:
                self.answer(place, into)
            except SparkdlError as error:
                if self._broken:
                    raise
                errors.append(error)
        if errors:
            raise errors[0]

    def answer(self, place: int, into: Sequence[torch.Tensor] = ()) -> list[int]:
        """Receive the answer of the owner at a place: its tensors in ``into``, and its numbers."""
        rank = self._owners[place]
        own: list[torch.Tensor] = []
        try:
            if rank == self.rank:
                words, own = self._box.get(timeout=self._limit.total_seconds())
            else:
                words = self._replies.receive(rank, self._limit)
            code, *rest = words
            if code:
                into = [torch.empty(rest[0], dtype=torch.uint8)]
            for i, tensor in enumerate(into):
                if rank == self.rank:
                    tensor.copy_(own[i])
                else:
                    self._replies.receive_into(tensor, rank, self._limit)
        except (RuntimeError, ValueError, queue.Empty) as error:
            raise self._lost(rank, error) from error
        if code:
            raise ERRORS[code - 1](text_of(into[0]))
        return rest

    def _lost(self, rank: int, error: Exception) -> SparkdlError:
        late = isinstance(error, queue.Empty) or "Timed out" in str(error)
        kind = StalledError if late else StateLostError
        what = f"did not answer within {self._limit.total_seconds():g} s" if late else "is gone"
        self._broken = f"rank {rank}, an owner, {what}."
        return kind(self._broken)

    def say_goodbye(self) -> None:
        """Tell the other owners that nothing more comes."""
        for place in self.places:
            if self._owners[place] != self.rank:
                self.send(place, Message.BYE, [])
        self._settle()

    def disconnect(self) -> None:
        """Close the connections, so that whoever waits for this rank gets an error."""
        self._requests.disconnect()
        self._replies.disconnect()

    def end(self) -> None:
        """End the server of this rank, and give up the process groups."""
        self.closed = True
        if self._server is not None:
            self._server.stop()
        self._requests.destroy()
        self._replies.destroy()
