"""The part of a parameter server that runs on a rank that owns ranges of keys.

[Note: the threads of an owner] A thread for each other rank receives its requests and puts them in a
queue. One thread takes them from there, so the values have one writer, and answers them. Requests
travel in one process group and answers in another: the thread that calls the client sends in the
first and receives in the second, and the owner's threads do the opposite. The owner's own client
puts its requests into the queue directly, because Gloo cannot send to itself.

A request that must wait (for its turn, for earlier positions, for other ranks) is parked with the
time until which it may wait. Whoever waits for longer is answered with an error, so no client waits
without a bound.

The ranges of one owner, and what operations do to them. Pure torch: no threads, no messages.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from sparkdl.collectives.key_range import (
    WHOLE,
    Gradient,
    KeyRange,
    KeySpec,
    MakeOptimizer,
    Manifest,
    Rounds,
    read_ranges,
    write_ranges,
)
from sparkdl.collectives.server_messages import (
    ERRORS,
    Kind,
    Message,
    Operation,
    OperationOrder,
    Request,
    ServerOptions,
    Words,
    message_of,
    pairs,
    places_of,
    tensors_of,
    text_of,
    text_tensor,
)
from sparkdl.errors import (
    CheckpointError,
    ParameterError,
    SparkdlError,
    StalledError,
    StateLostError,
    TrainingError,
    first_line,
    in_short,
)


class OwnedRanges:
    """The rows of all keys that lie at one owner."""

    def __init__(
        self, clients: int, make: MakeOptimizer | None, synchronous: bool, average: bool
    ) -> None:
        self._make, self._synchronous, self._average = make, synchronous, average
        self._clients, self._active = clients, list(range(clients))
        self._ranges: dict[int, KeyRange] = {}
        self._rounds: dict[int, Rounds] = {}

    def init(self, key: int, values: torch.Tensor) -> None:
        """Add a range."""
        self.add({key: KeyRange(values, self._make, self._average)})

    def add(self, ranges: Mapping[int, KeyRange]) -> None:
        """Add ranges by the numbers of their keys."""
        self._ranges |= ranges
        self._rounds |= {key: Rounds(self._clients) for key in ranges}

    def save(self, path: Path) -> None:
        """Write all ranges to a file."""
        write_ranges(path, self._ranges)

    def push(self, client: int, words: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Take a client's gradients, and make the steps that they complete.

        ``words`` has the key and the number of rows, or WHOLE, of each gradient; ``tensors`` has
        its rows, unless they are all, and its values.
        """
        left = iter(tensors)
        for key, count in pairs(words):
            rows = None if count == WHOLE else next(left)
            gradient = Gradient(next(left), rows)
            if self._synchronous:
                self._rounds[key].add(client, gradient)
                self._step_complete(key)
            else:
                self._ranges[key].step([gradient])

    def pull(self, words: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return values, which the next push may change; see :meth:`push`."""
        left, found = iter(tensors), []
        for key, count in pairs(words):
            values = self._ranges[key].values
            found.append(values if count == WHOLE else values[next(left)])
        return found

    def finish(self, client: int) -> None:
        """Make the steps that waited for this client alone, which pushes no more."""
        self._active.remove(client)
        for key in self._rounds:
            self._step_complete(key)

    def use(self, make: MakeOptimizer | None) -> None:
        """Update with new optimizers from now on."""
        self._make = make
        for its in self._ranges.values():
            its.use(make)

    def _step_complete(self, key: int) -> None:
        for gradients in self._rounds[key].complete(self._active):
            self._ranges[key].step(gradients)


JOIN_SECONDS = 5.0


class Server:
    """The owner at one place; that at place 0 gives the turns.

    The client of this process adds to ``keys`` before it initializes them.
    """

    def __init__(
        self,
        place: int,
        places: int,
        requests: Words,
        replies: Words,
        keys: dict[int, KeySpec],
        make: MakeOptimizer | None,
        options: ServerOptions,
    ) -> None:
        self._place, self._requests, self._replies = place, requests, replies
        self._keys, self._options = keys, options
        self._order = OperationOrder(requests.size, options.staleness, options.replay)
        self._positions = [0] * places
        self._ranges = OwnedRanges(
            requests.size, make, synchronous=options.synchronous, average=options.average
        )
        self._turn_asked: dict[int, Request] = {}
        self._met: dict[int, Request] = {}
        self._held: dict[int, Request] = {}
        self._next = 0
        self._failure: SparkdlError | None = None
        self._queue: queue.SimpleQueue[Request | SparkdlError | None] = queue.SimpleQueue()
        thread = partial(threading.Thread, daemon=True)
        self._server = thread(target=self._serve, name="sparkdl-server")
        self._listeners = [
            thread(target=self._listen, args=(peer,), name="sparkdl-listener")
            for peer in range(requests.size)
            if peer != requests.rank
        ]
        self.next_make, self._next_ranges = make, dict[int, KeyRange]()

    def start(self) -> None:
        """Start the threads."""
        for thread in (self._server, *self._listeners):
            thread.start()

    def read(self, saved: Manifest, specs: Sequence[KeySpec], make: MakeOptimizer | None) -> None:
        """Read this owner's ranges of a checkpoint, which it has once LOAD has its turn."""
        self._next_ranges = read_ranges(saved, specs, self._place, make, self._options.average)

    def submit(self, request: Request) -> None:
        """Add a request to the queue."""
        request.until = time.monotonic() + self._options.timeout
        self._queue.put(request)

    def stop(self) -> None:
        """End the threads, once every peer has said goodbye or its connection is closed."""
        for thread in self._listeners:
            thread.join(JOIN_SECONDS)
        self._queue.put(None)
        self._server.join(JOIN_SECONDS)

    def _listen(self, peer: int) -> None:
        """Receive the requests of one peer until it says goodbye."""
        answer = partial(self._replies.send, peer, limit=timedelta(seconds=self._options.timeout))
        try:
            while True:
                number, *words = self._requests.receive(peer)
                kind = Message(number)
                if kind == Message.BYE:
                    return
                tensors = [
                    self._requests.receive_into(torch.empty(shape, dtype=dtype), peer)
                    for shape, dtype in tensors_of(kind, words, self._keys, self._place)
                ]
                self.submit(Request(peer, kind, words, tensors, answer))
        except Exception as error:  # whatever Gloo raises
            self._queue.put(
                StateLostError(f"the connection to rank {peer} is lost: {first_line(error)}")
            )

    def _serve(self) -> None:
        """Take requests from the queue until None comes."""
        while True:
            parked = [*self._turn_asked.values(), *self._met.values(), *self._held.values()]
            wait = min((request.until for request in parked), default=None)
            try:
                found = self._queue.get(
                    timeout=None if wait is None else max(0.0, wait - time.monotonic())
                )
            except queue.Empty:
                self._expire()
                continue
            if found is None:
                return
            try:
                if isinstance(found, SparkdlError):
                    raise found
                self._handle(found)
            except SparkdlError as error:
                self._fail(error)
            except Exception as error:  # of the user's optimizer
                rank, what = self._requests.rank, in_short(error)
                self._fail(TrainingError(f"an update failed on rank {rank}: {what}"))

    def _handle(self, request: Request) -> None:
        if self._failure is not None:
            self._refuse(request, self._failure)
        elif request.kind == Message.TURN:
            self._ask_turn(request)
        elif request.kind == Message.MEET:
            self._meet(request)
        elif request.kind == Message.INIT:
            self._ranges.init(request.words[0], request.tensors[0])
            self._answer(request)
        else:
            self._hold(request)

    def _hold(self, request: Request) -> None:
        """Apply a request once all earlier positions have been applied."""
        self._held[request.words[0]] = request
        while self._next in self._held:
            self._apply(self._held[self._next])
            del self._held[self._next]  # only now: a failure is answered to what is held
            self._next += 1

    def _ask_turn(self, request: Request) -> None:
        kind, count, *rest = request.words
        self._turn_asked[request.client] = request
        self._order.ask(Operation(request.client, Kind(kind), tuple(rest[:count])))
        while (granted := self._order.grant()) is not None:
            its = self._turn_asked.pop(granted.client)
            places, words = places_of(its.words)
            positions = [self._positions[place] for place in places]
            for place in places:
                self._positions[place] += 1
            self._answer(its, positions)
            if 0 in places:
                own = [positions[places.index(0)], *words]
                self._hold(replace(its, kind=message_of(its.words), words=own))

    def _meet(self, request: Request) -> None:
        """Answer all ranks once each of them has come."""
        self._met[request.client] = request
        if len(self._met) < self._requests.size:
            return
        texts = {client: text_of(its.tensors[0]) for client, its in sorted(self._met.items())}
        met, self._met = list(self._met.values()), {}
        if len(set(texts.values())) == 1:
            order = list(self._order.order) if set(texts.values()) == {"close"} else []
            for its in met:
                self._answer(its, order)
            return
        lines = "\n".join(f"  rank {client}: {text}" for client, text in texts.items())
        error = ParameterError(f"The ranks do not call the same:\n{lines}")
        for its in met:
            self._refuse(its, error)

    def _apply(self, request: Request) -> None:
        """Do what has its position now."""
        words = request.words[1:]
        if request.kind == Message.PUSH:
            self._ranges.push(request.client, words, request.tensors)
            return
        values: list[torch.Tensor] = []
        if request.kind == Message.PULL:
            values = self._ranges.pull(words, request.tensors)
        elif request.kind == Message.FINISH:
            self._ranges.finish(request.client)
        elif request.kind == Message.SAVE:
            try:
                self._ranges.save(Path(text_of(request.tensors[0])))
            except CheckpointError as error:  # the server itself can go on
                return self._refuse(request, error)
        elif request.kind == Message.LOAD:
            self._ranges.add(self._next_ranges)
        else:
            self._ranges.use(self.next_make)
        self._answer(request, tensors=values)

    def _expire(self) -> None:
        """Answer the requests that have waited for too long."""
        now, seconds = time.monotonic(), f"{self._options.timeout:g} s"
        for client, request in list(self._turn_asked.items()):
            if request.until <= now:
                del self._turn_asked[client]
                keys = request.words[2 : 2 + request.words[1]]
                names = ", ".join(repr(self._keys[key].name) for key in keys) or "the end"
                why = self._order.withdraw(client)
                self._refuse(request, StalledError(f"{names}: no turn within {seconds}: {why}."))
        if any(request.until <= now for request in self._met.values()):
            ranks = [str(rank) for rank in range(self._requests.size) if rank not in self._met]
            for request in self._met.values():
                text = text_of(request.tensors[0])
                late = f"{text}: rank {', '.join(ranks)} has not called it within {seconds}."
                self._refuse(request, StalledError(late))
            self._met.clear()
        if any(request.until <= now for request in self._held.values()):
            self._fail(
                StalledError(
                    f"operation {self._next} has its turn, and has not come to rank "
                    f"{self._requests.rank} within {seconds}: its client was interrupted."
                )
            )

    def _fail(self, error: SparkdlError) -> None:
        """Answer everything that waits, and everything that comes, with an error."""
        self._failure = self._failure or error
        for parked in (self._turn_asked, self._met, self._held):
            for request in parked.values():
                self._refuse(request, self._failure)
            parked.clear()

    def _refuse(self, request: Request, error: SparkdlError) -> None:
        if request.kind != Message.PUSH:
            code = 1 + next(i for i, kind in enumerate(ERRORS) if isinstance(error, kind))
            text = text_tensor(str(error))
            self._answer(request, [len(text)], [text], code)

    def _answer(
        self,
        request: Request,
        words: Sequence[int] = (),
        tensors: Sequence[torch.Tensor] = (),
        code: int = 0,
    ) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # its listener finds that it is gone
            request.answer([code, *words], tensors)
