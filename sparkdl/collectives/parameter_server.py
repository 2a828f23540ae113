"""A parameter server on the ranks of a process group: keys, pushes of gradients, pulls of values."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collectives import arguments, server_arguments
from sparkdl.collectives.key_range import KeySpec, MakeOptimizer
from sparkdl.collectives.server import ERRORS, WHOLE, Message, Request, Server, ServerOptions
from sparkdl.collectives.turns import Kind
from sparkdl.collectives.words import Words, text_of, text_tensor
from sparkdl.errors import (
    ParameterError,
    SparkdlError,
    StalledError,
    StateLostError,
    nearest,
    raise_all,
)

GRACE_SECONDS = 5.0
"""How much longer a client waits than the owner, whose error says more."""
_open: weakref.WeakSet[ParameterServer] = weakref.WeakSet()


class ParameterServer:
    """Tensors that the ranks of a process group share, updated where they lie.

    A *key* names a tensor. Its rows are shared out to *owners*, which are ranks. Every rank is a
    *client*: it pulls values and pushes gradients, from which an owner makes a step of the
    optimizer. Owners serve in threads of their own, beside whatever the rank does.

    =====================  ================================================================
    ``consistency``        one step of a key takes
    =====================  ================================================================
    ``"asynchronous"``     one gradient, as soon as it comes. ``staleness=s``: a client that
                           has pushed a key more than s times more often than the slowest
                           one waits; None (the default): nobody waits.
    ``"synchronous"``      a gradient of every client: their mean. ``staleness=0`` (the
                           default): a pull waits for all earlier steps; ``staleness=s``: it
                           may miss the last s (stale synchronous).
    =====================  ================================================================

    All owners apply operations in one order, so a pull never mixes two states. :attr:`order` has
    it after :meth:`close`, and ``replay=order`` repeats it: the same function on the same data
    then gives the same bits, whatever the speeds of the ranks.

    The constructor, :meth:`init`, :meth:`set_optimizer`, :meth:`barrier` and :meth:`close` are
    called on all ranks in the same order; pushes and pulls by whoever wants to. Use the object as a
    context manager, which closes it. It may be used from several threads, one at a time.

    Args:
        optimizer: A ``torch.optim`` class, or a ``partial`` of one, that is called with a list of
            tensors. None means that what is pushed is added to the value.
        consistency: "asynchronous" or "synchronous".
        staleness: How far clients may be apart, see above.
        owners: The ranks that have the values. None means all ranks.
        average: Whether a synchronous step takes the mean of the gradients. Otherwise it takes
            their sum.
        timeout: The seconds that any call may wait.
        replay: The order of an earlier run.

    Raises:
        sparkdl.ParameterError: There is no process group, an argument is wrong, or ranks differ.
    """

    def __init__(
        self,
        optimizer: MakeOptimizer | None = None,
        *,
        consistency: str = "asynchronous",
        staleness: int | None = None,
        owners: Iterable[int] | None = None,
        average: bool = True,
        timeout: float = 300.0,
        replay: Sequence[int] | torch.Tensor | None = None,
    ) -> None:
        self.size, self._owners, order = server_arguments.checked(
            optimizer, consistency, staleness, owners, timeout, replay
        )
        self.rank = dist.get_rank()
        synchronous = consistency == "synchronous"
        stale = 0 if synchronous and staleness is None else staleness
        options = ServerOptions(
            synchronous=synchronous,
            staleness=stale,
            average=average,
            timeout=timeout,
            replay=order,
        )
        self._optimizer, self._order = optimizer, torch.empty(0, dtype=torch.int32)
        self._limit = timedelta(seconds=timeout + GRACE_SECONDS)
        self._lock = threading.RLock()
        self._closed, self._broken = False, ""
        self._names: dict[Hashable, KeySpec] = {}
        self._keys: dict[int, KeySpec] = {}
        self._box: queue.SimpleQueue[tuple[Sequence[int], list[torch.Tensor]]] = queue.SimpleQueue()
        groups = [dist.new_group(backend="gloo", timeout=self._limit) for _ in range(2)]
        self._requests, self._replies = map(Words, groups)
        text = (
            f"ParameterServer({consistency}, staleness={stale}, owners={self._owners}, {average=}"
        )
        text += "" if order is None else f", replay of {len(order)} operations"
        try:
            arguments.compare(groups[0], text + ")", 0, torch.device("cpu"))
        except ParameterError:
            self._requests.destroy()
            self._replies.destroy()
            raise
        self._server: Server | None = None
        if self.rank in self._owners:
            place = self._owners.index(self.rank)
            self._server = Server(
                place,
                len(self._owners),
                self._requests,
                self._replies,
                self._keys,
                optimizer,
                options,
            )
            self._server.start()
        _open.add(self)

    @property
    def order(self) -> torch.Tensor:
        """Return the rank of each operation in their order, int32, once the server is closed."""
        if not self._closed:
            raise ParameterError(
                "The order is known when the server is closed: call close() first."
            )
        return self._order

    def init(self, key: Any, value: Any) -> None:
        """Give a key its first value, that of rank 0.

        Args:
            key: A name: a str, an int or another hashable object that is no list. Or a list of them.
            value: A tensor, or a list of as many. All ranks give the same shapes and dtypes.

        Raises:
            sparkdl.ParameterError: The key exists, or the ranks differ.
        """
        names, values = server_arguments.as_lists(key, value)
        raise_all(ParameterError, server_arguments.new_keys(names, values, self._names))
        with self._in_use():
            first = len(self._names)
            specs = [
                KeySpec.of(name, first + i, its, len(self._owners))
                for i, (name, its) in enumerate(zip(names, values, strict=True))
            ]
            self._keys.update((spec.number, spec) for spec in specs)  # before owners receive them
            told = "; ".join(
                f"{s.name!r} {arguments.name_of(s.dtype)} {list(s.shape)}" for s in specs
            )
            self._meet(f"init {told}")
            if self.rank == 0:
                for spec, whole in zip(specs, values, strict=True):
                    rows = _rows(whole.detach())
                    for place in spec.places:
                        part = rows[spec.range_of(place)].cpu()
                        self._send(place, Message.INIT, [spec.number], [part])
                    for place in spec.places:
                        self._answer(place)
            self._meet(f"init {told}")
            self._names.update((spec.name, spec) for spec in specs)

    def push(self, key: Any, gradient: Any) -> None:
        """Push a gradient. Return when it has its turn and was sent; the owners apply it then.

        Args:
            key: A key, or a list of keys, which are pushed as one operation.
            gradient: A tensor of the key's shape and dtype on any device, or a list of tensors.

        Raises:
            sparkdl.ParameterError: There is no such key, or a gradient does not fit.
            sparkdl.StalledError: The slowest client is too far behind for longer than ``timeout``.
            sparkdl.StateLostError: A rank is lost.
        """
        names, gradients = server_arguments.as_lists(key, gradient)
        specs = [self._spec(name) for name in names]
        raise_all(ParameterError, server_arguments.gradients(specs, gradients))
        with self._in_use():
            places = sorted({place for spec in specs for place in spec.places})
            wholes = [_rows(its.detach()) for its in gradients]
            for place, position in self._turn(Kind.PUSH, specs, places):
                here = [(s, its) for s, its in zip(specs, wholes, strict=True) if place in s.places]
                words = [position, len(here), *(n for s, _ in here for n in (s.number, WHOLE))]
                parts = [its[s.range_of(place)].cpu() for s, its in here]
                self._send(place, Message.PUSH, words, parts)

    def pull(self, key: Any, out: Any = None) -> Any:
        """Return the value of a key, after all operations before this one.

        Args:
            key: A key, or a list of keys, which are pulled as one operation.
            out: A tensor, or a list of tensors, to copy the values into.

        Returns:
            A new CPU tensor, or a list of them; or ``out``.

        Raises what :meth:`push` raises.
        """
        names, outs = server_arguments.as_lists(key, out)
        specs = [self._spec(name) for name in names]
        if out is not None:
            raise_all(ParameterError, server_arguments.gradients(specs, outs))
        with self._in_use():
            places = sorted({place for spec in specs for place in spec.places})
            values = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
            wanted = []
            for place, position in self._turn(Kind.PULL, specs, places):
                here = [(s, v) for s, v in zip(specs, values, strict=True) if place in s.places]
                words = [position, len(here), *(n for s, _ in here for n in (s.number, WHOLE))]
                self._send(place, Message.PULL, words)
                wanted.append((place, [_rows(v)[s.range_of(place)] for s, v in here]))
            self._answers(wanted)
        if out is None:
            return values if isinstance(key, list) else values[0]
        with torch.no_grad():
            for into, value in zip(outs, values, strict=True):
                into.copy_(value)
        return out

    def push_rows(self, key: Hashable, rows: Any, values: torch.Tensor) -> None:
        """Push the gradient of some rows; the optimizer updates these rows alone.

        Args:
            key: A key whose tensor has rows.
            rows: The numbers of the rows: int64, (n,). One that stands twice counts twice.
            values: Their gradients, (n, ...).

        Raises:
            sparkdl.ParameterError: As :meth:`push`; or the optimizer takes no sparse gradients.
        """
        spec = self._spec(key)
        rows, values = torch.as_tensor(rows).cpu(), values.detach().cpu()
        problems = server_arguments.rows(spec, rows) + server_arguments.row_values(
            spec, rows, values
        )
        raise_all(ParameterError, problems or server_arguments.sparse(self._optimizer, spec))
        with self._in_use():
            where = spec.places_of(rows)
            for place, position in self._turn(Kind.PUSH, [spec], spec.places):
                chosen = where == place
                its = rows[chosen] - spec.range_of(place).start
                words = [position, 1, spec.number, len(its)]
                self._send(place, Message.PUSH, words, [its, values[chosen]])

    def pull_rows(self, key: Hashable, rows: Any) -> torch.Tensor:
        """Return some rows of a key, (n, ...), in the order of ``rows``. See :meth:`pull`."""
        spec = self._spec(key)
        rows = torch.as_tensor(rows).cpu()
        raise_all(ParameterError, server_arguments.rows(spec, rows))
        found = torch.empty(len(rows), *spec.row_shape, dtype=spec.dtype)
        with self._in_use():
            where = spec.places_of(rows)
            wanted = []
            for place, position in self._turn(Kind.PULL, [spec], where.unique().tolist()):
                its = rows[where == place] - spec.range_of(place).start
                self._send(place, Message.PULL, [position, 1, spec.number, len(its)], [its])
                wanted.append((place, [torch.empty(len(its), *spec.row_shape, dtype=spec.dtype)]))
            self._answers(wanted)
            for place, (values,) in wanted:
                found[where == place] = values
        return found

    def set_optimizer(self, optimizer: MakeOptimizer | None) -> None:
        """Update with a new optimizer from now on. What the old one knew, such as momentum, is lost.

        Args:
            optimizer: See the class. Every rank gives the same.
        """
        raise_all(ParameterError, server_arguments.optimizer(optimizer, len(self._owners)))
        with self._in_use():
            self._optimizer = optimizer
            if self._server is not None:
                self._server.next_make = optimizer
            self._meet("set_optimizer")
            if self.rank == 0:
                for place, position in self._turn(Kind.PULL, [], range(len(self._owners))):
                    self._send(place, Message.OPTIMIZER, [position])
                self._answers([(place, []) for place in range(len(self._owners))])
            self._meet("set_optimizer")

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        with self._in_use():
            self._meet("barrier")

    def close(self) -> None:
        """Finish, wait for all ranks, and end the server. Nobody waits for this rank's pushes now.

        Raises:
            sparkdl.SparkdlError: An update has failed on an owner, or a rank is lost or too late.
        """
        with self._lock:
            if self._closed:
                return
            try:
                with self._in_use():
                    places = range(len(self._owners))
                    for place, position in self._turn(Kind.FINISH, [], places):
                        self._send(place, Message.FINISH, [position])
                    self._answers([(place, []) for place in places])
                    self._order = torch.tensor(self._meet("close"), dtype=torch.int32)
                    for place in places:
                        if self._owners[place] != self.rank:
                            self._send(place, Message.BYE, [])
            except BaseException:
                self.abandon()
                raise
            self._end()

    def abandon(self) -> None:
        """End the server at once, without waiting for others: their calls fail."""
        if not self._closed:
            self._requests.disconnect()
            self._replies.disconnect()
            self._end()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def _end(self) -> None:
        self._closed = True
        _open.discard(self)
        if self._server is not None:
            self._server.stop()
        self._requests.destroy()
        self._replies.destroy()

    def _spec(self, name: Hashable) -> KeySpec:
        if self._closed:
            raise ParameterError("This ParameterServer is closed: make a new one.")
        if name not in self._names:
            texts = [known for known in self._names if isinstance(known, str)]
            close = nearest(name, texts) if isinstance(name, str) else ""
            raise ParameterError(f"There is no key {name!r}: init it on all ranks first.{close}")
        return self._names[name]

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Let one thread talk to the owners; after half a conversation nobody can any more."""
        with self._lock:
            if self._closed:
                raise ParameterError("This ParameterServer is closed: make a new one.")
            if self._broken:
                raise StateLostError(f"This ParameterServer cannot go on: {self._broken}")
            try:
                yield
            except BaseException as error:
                if not isinstance(error, SparkdlError):
                    self._broken = f"a call was interrupted by {type(error).__name__}."
                raise

    def _turn(
        self, kind: Kind, specs: Sequence[KeySpec], places: Iterable[int]
    ) -> Iterable[tuple[int, int]]:
        """Wait for the turn of an operation; return the places with its position at each."""
        its = list(places)
        numbers = [spec.number for spec in specs]
        self._send(0, Message.TURN, [kind, len(numbers), *numbers, *its])
        return list(zip(its, self._answer(0), strict=True))

    def _meet(self, text: str) -> list[int]:
        note = text_tensor(text)
        self._send(0, Message.MEET, [len(note)], [note])
        return self._answer(0)

    def _send(
        self, place: int, kind: Message, words: Sequence[int], tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        rank = self._owners[place]
        if rank == self.rank:
            assert self._server is not None
            own = [tensor.clone() for tensor in tensors]
            self._server.submit(Request(rank, kind, words, own, self._put_answer))
            return
        try:
            self._requests.send(rank, [kind, *words], tensors, self._limit)
        except (RuntimeError, ValueError) as error:
            raise self._lost(rank, error) from error

    def _put_answer(self, words: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Pass an answer of this rank's own server on, in memory that the server does not change."""
        self._box.put((words, [tensor.clone() for tensor in tensors]))

    def _answers(self, wanted: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        """Receive the answers of several places, also after an error of one of them."""
        errors = []
        for place, into in wanted:
            try:
                self._answer(place, into)
            except SparkdlError as error:
                if self._broken:
                    raise
                errors.append(error)
        if errors:
            raise errors[0]

    def _answer(self, place: int, into: Sequence[torch.Tensor] = ()) -> list[int]:
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


def abandon_all() -> None:
    """Abandon every parameter server of this process that nobody has closed."""
    for server in list(_open):
        server.abandon()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its rows along the first dimension, also if it has no dimension."""
    return tensor if tensor.dim() else tensor.view(1)
