"""The part of a parameter server that runs on a rank that owns ranges of keys.

[Note: the threads of an owner] A thread for each other rank receives its requests and puts them in a
queue. One thread takes them from there, so the values have one writer, and answers them. Requests
travel in one process group and answers in another: the thread that calls the client sends in the
first and receives in the second, and the owner's threads do the opposite. The owner's own client
puts its requests into the queue directly, because Gloo cannot send to itself.

A request that must wait (for its turn, for earlier positions, for other ranks) is parked with the
time until which it may wait. Whoever waits for longer is answered with an error, so no client waits
without a bound.
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
from typing import Any

import torch

from sparkdl.collectives.key_range import (
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
    Operation,
    OperationOrder,
    Request,
    ServerOptions,
    Words,
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
        self._active = list(range(requests.size))
        self._ranges: dict[int, KeyRange] = {}
        self._rounds: dict[int, Rounds] = {}
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
        self._make = self.next_make = make
        self._next_ranges: dict[int, KeyRange] = {}

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
                (kind, *words), tensors = self._requests.receive(peer)
                if kind == Kind.BYE:
                    return
                self.submit(Request(peer, Kind(kind), words, tensors, answer))
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
        elif request.kind == Kind.TURN:
            self._ask_turn(request)
        elif request.kind == Kind.MEET:
            self._meet(request)
        elif request.kind == Kind.INIT:
            values = KeyRange(request.tensors[0], self._make, self._options.average)
            self._add({request.words[0]: values})
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
        self._turn_asked[request.client] = request
        kind, keys, *_ = request.words
        self._order.ask(Operation(request.client, Kind(kind), tuple(keys)))
        while (granted := self._order.grant()) is not None:
            its = self._turn_asked.pop(granted.client)
            kind, _, places, words = its.words
            positions = [self._positions[place] for place in places]
            for place in places:
                self._positions[place] += 1
            self._answer(its, positions)
            if 0 in places:
                own = [positions[places.index(0)], *words]
                self._hold(replace(its, kind=Kind(kind), words=own))

    def _meet(self, request: Request) -> None:
        """Answer all ranks once each of them has come."""
        self._met[request.client] = request
        if len(self._met) < self._requests.size:
            return
        texts = {client: its.words[0] for client, its in sorted(self._met.items())}
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
        words, left = request.words[1:], iter(request.tensors)
        if request.kind == Kind.PUSH:
            for key, by_rows in words:
                rows = next(left) if by_rows else None
                self._push(key, request.client, Gradient(next(left), rows))
            return
        values: list[torch.Tensor] = []
        if request.kind == Kind.PULL:  # the next push may change them
            for key, by_rows in words:
                whole = self._ranges[key].values
                values.append(whole[next(left)] if by_rows else whole)
        elif request.kind == Kind.FINISH:
            self._active.remove(request.client)  # it pushes no more
            for key in self._rounds:
                self._step_complete(key)
        elif request.kind == Kind.SAVE:
            try:
                write_ranges(Path(words[0]), self._ranges)
            except CheckpointError as error:  # the server itself can go on
                return self._refuse(request, error)
        elif request.kind == Kind.LOAD:
            self._add(self._next_ranges)
        else:
            self._make = self.next_make
            for its in self._ranges.values():
                its.use(self._make)
        self._answer(request, tensors=values)

    def _add(self, ranges: Mapping[int, KeyRange]) -> None:
        """Add ranges by the numbers of their keys."""
        self._ranges |= ranges
        self._rounds |= {key: Rounds(self._requests.size) for key in ranges}

    def _push(self, key: int, client: int, gradient: Gradient) -> None:
        """Take a client's gradient, and make the steps that it completes."""
        if self._options.synchronous:
            self._rounds[key].add(client, gradient)
            self._step_complete(key)
        else:
            self._ranges[key].step([gradient])

    def _step_complete(self, key: int) -> None:
        for gradients in self._rounds[key].complete(self._active):
            self._ranges[key].step(gradients)

    def _expire(self) -> None:
        """Answer the requests that have waited for too long."""
        now, seconds = time.monotonic(), f"{self._options.timeout:g} s"
        for client, request in list(self._turn_asked.items()):
            if request.until <= now:
                del self._turn_asked[client]
                keys = [self._keys[key].name for key in request.words[1]]
                names = ", ".join(map(repr, keys)) or "the end"
                why = self._order.withdraw(client)
                self._refuse(request, StalledError(f"{names}: no turn within {seconds}: {why}."))
        if any(request.until <= now for request in self._met.values()):
            ranks = [str(rank) for rank in range(self._requests.size) if rank not in self._met]
            for request in self._met.values():
                called = f"{request.words[0]}: rank {', '.join(ranks)}"
                late = f"{called} has not called it within {seconds}."
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
        if request.kind != Kind.PUSH:
            name = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
            self._answer(request, [str(error)], error=name)

    def _answer(
        self,
        request: Request,
        words: Sequence[Any] = (),
        tensors: Sequence[torch.Tensor] = (),
        error: str = "",
    ) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # its listener finds that it is gone
            request.answer([error, *words], tensors)
