"""The conversation of one client with the owners of a parameter server.

Checks of the arguments of a parameter server. Each check returns the problems that it finds.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collectives.communicator import compare_calls, dtype_name
from sparkdl.collectives.key_range import KeySpec, MakeOptimizer
from sparkdl.collectives.server import Server
from sparkdl.collectives.server_messages import ERRORS, Kind, Request, ServerOptions, Words
from sparkdl.errors import (
    ParameterError,
    SparkdlError,
    StalledError,
    StateLostError,
    first_line,
    in_short,
    kind_of,
    nearest,
    raise_all,
    shown,
)
from sparkdl.plain import is_number, is_whole, plain

GRACE_SECONDS = 5.0
"""How much longer a client waits than the owner, whose error says more."""

Part = tuple[Sequence[Any], Sequence[torch.Tensor]]
"""The words and tensors that an operation sends to a place."""


class Client:
    """One rank's end of the messages to all owners, with the server of this rank if it is one.

    All ranks make it together. The caller adds to ``keys`` before it initializes them.
    """

    def __init__(
        self,
        owners: Sequence[int],
        keys: dict[int, KeySpec],
        make: MakeOptimizer | None,
        options: ServerOptions,
    ) -> None:
        self._limit = timedelta(seconds=options.timeout + GRACE_SECONDS)
        self._requests, self._replies = (
            Words(dist.new_group(backend="gloo", timeout=self._limit)) for _ in range(2)
        )
        operations = None if options.replay is None else len(options.replay)
        text = f"{replace(options, replay=None)} of owners {owners}, {operations=}"
        try:
            compare_calls(self._requests.group, text, 0, torch.device("cpu"))
        except ParameterError:
            self._requests.destroy()
            self._replies.destroy()
            raise
        self.rank, self.closed, self._owners = self._requests.rank, False, owners
        self.server: Server | None = None
        if self.rank in owners:
            place, both = owners.index(self.rank), (self._requests, self._replies)
            self.server = Server(place, len(owners), *both, keys, make, options)
            self.server.start()
        self._posted: list[tuple[int, dist.Work]] = []
        self._lock, self._broken = threading.RLock(), ""
        self._box: queue.SimpleQueue[Part] = queue.SimpleQueue()

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
        self.send(0, Kind.TURN, [kind, keys, [*parts], words], tensors)
        positions = self.answer(0)
        for (place, (words, tensors)), position in zip(parts.items(), positions, strict=True):
            if place:
                self.send(place, kind, [position, *words], tensors)

    def meet(self, text: str) -> list[int]:
        """Return when every rank has said the same text; for "close", return the order."""
        self.send(0, Kind.MEET, [text])
        return self.answer(0)

    def send(
        self, place: int, kind: Kind, words: Sequence[Any], tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """Send a request to the owner at a place, which has it once it answers.

        Do not wait for it before: if the owner is lost meanwhile, Gloo may not end such a wait.
        """
        rank = self._owners[place]
        if rank == self.rank:
            assert self.server is not None
            own = [tensor.clone() for tensor in tensors]
            self.server.submit(Request(rank, kind, words, own, self._put_answer))
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

    def _put_answer(self, words: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
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

    def answer(self, place: int, into: Sequence[torch.Tensor] = ()) -> list[Any]:
        """Receive the answer of the owner at a place: its tensors in ``into``, and its words."""
        rank = self._owners[place]
        try:
            if rank == self.rank:
                words, own = self._box.get(timeout=self._limit.total_seconds())
                for tensor, value in zip(into, own, strict=False):  # an error has none
                    tensor.copy_(value)
            else:
                words, _ = self._replies.receive(rank, self._limit, into)
        except (RuntimeError, ValueError, queue.Empty) as error:
            raise self._lost(rank, error) from error
        kind, *rest = words
        if kind:
            raise ERRORS[kind](*rest)
        return list(rest)

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
                self.send(place, Kind.BYE, [])
        self._settle()

    def disconnect(self) -> None:
        """Close the connections, so that whoever waits for this rank gets an error."""
        self._requests.disconnect()
        self._replies.disconnect()

    def end(self) -> None:
        """End the server of this rank, and give up the process groups."""
        self.closed = True
        if self.server is not None:
            self.server.stop()
        self._requests.destroy()
        self._replies.destroy()


CONSISTENCIES = ("asynchronous", "synchronous")


def checked_options(
    make: Any,
    consistency: Any,
    staleness: Any,
    owners: Iterable[int] | None,
    average: bool,
    timeout: Any,
    replay: Any,
) -> tuple[list[int], ServerOptions]:
    """Check the arguments of the constructor; return the owners' ranks and the options."""
    if not dist.is_initialized():
        raise ParameterError(
            "There is no process group: make a ParameterServer in a function that "
            "sparkdl.gang.run runs on every rank."
        )
    size = dist.get_world_size()
    problems = []
    if consistency not in CONSISTENCIES:
        known = " or ".join(f'"{word}"' for word in CONSISTENCIES)
        close = nearest(consistency, CONSISTENCIES) if isinstance(consistency, str) else ""
        problems.append(f"consistency = {shown(consistency)}: give {known}.{close}")
    if staleness is not None and not is_whole(staleness, 0):
        problems.append(
            f"staleness = {shown(staleness)}: give a whole number of at least 0, or None."
        )
    ranks = list(range(size)) if owners is None else _ranks(owners, size)
    if not ranks or len(set(ranks)) < len(ranks):
        problems.append(
            f"owners = {shown(owners)}: give a list of different ranks from 0 to {size - 1}."
        )
    if not (is_number(timeout) and timeout > 0):
        problems.append(f"timeout = {shown(timeout)}: give a number of seconds above 0.")
    order = None if replay is None else _ranks(replay)
    if replay is not None and not order:
        problems.append(f"replay is {kind_of(replay)}: give the order of a closed server.")
    elif order and max(order) >= size:
        problems.append(
            f"replay: the order is that of {max(order) + 1} ranks, and here are {size}. Run as many."
        )
    raise_all(ParameterError, problems + optimizer_problems(make, len(ranks)))
    synchronous = consistency == "synchronous"
    return ranks, ServerOptions(
        synchronous=synchronous,
        staleness=0 if synchronous and staleness is None else staleness,
        average=average,
        timeout=timeout,
        replay=order,
    )


def _ranks(given: Any, size: int = sys.maxsize) -> list[int]:
    """Return ranks below ``size`` as a list, which is empty if they are none."""
    found = plain(given)
    found = list(found) if isinstance(found, Iterable) else [None]
    return found if all(is_whole(rank, 0) and rank < size for rank in found) else []


def optimizer_problems(make: Any, places: int) -> list[str]:
    """Return the problem of an optimizer that cannot be made, or not for rows of a tensor."""
    if make is None:
        return []
    generator = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(4, 2, generator=generator) for _ in range(2))
    try:
        name = type(make([value.clone()])).__name__
        whole = _tried(make, value, gradient)
        parts = [_tried(make, value[rows], gradient[rows]) for rows in (slice(2), slice(2, 4))]
    except Exception as error:
        return [
            f"optimizer = {shown(make)}: give a torch.optim class or a partial of one, such as "
            "partial(torch.optim.SGD, lr=0.1), whose step takes no closure. With a list of tensors "
            f"it raises {in_short(error)}."
        ]
    if places > 1 and not torch.allclose(whole, torch.cat(parts), rtol=1e-4, atol=1e-6):
        return [
            f"optimizer: {name} looks at whole tensors, and {places} owners have some rows each. "
            "Use one owner, such as owners=[0]."
        ]
    return []


def sparse_problems(make: MakeOptimizer | None, spec: KeySpec) -> list[str]:
    """Return the problem of an optimizer that takes no sparse gradients."""
    value = torch.zeros(2, *spec.row_shape, dtype=spec.dtype)
    error = _error_of_step(make, value, _sparse(torch.ones_like(value)))
    return (
        []
        if error is None
        else [
            f"push_rows: the optimizer takes no gradient of some rows ({first_line(error)}). Use "
            "torch.optim.SGD, Adagrad or SparseAdam, or push the whole gradient."
        ]
    )


def _tried(make: MakeOptimizer, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the value after two steps, with sparse gradients if the optimizer takes no others."""
    found = value.clone()
    try:
        return _step(make, found, gradient)
    except RuntimeError:
        return _step(make, found, _sparse(gradient))


def _step(make: MakeOptimizer, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    made = make([value])
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"it returned {kind_of(made)}")
    for _ in range(2):
        value.grad = gradient.clone()
        made.step()
    return value


def _error_of_step(
    make: MakeOptimizer | None, value: torch.Tensor, gradient: torch.Tensor
) -> Exception | None:
    """Return why an optimizer cannot make a step, or None."""
    try:
        if make is not None:
            _step(make, value, gradient)
    except Exception as error:
        return error
    return None


def _sparse(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_sparse(1).coalesce()


def as_lists(key: Any, value: Any) -> tuple[list[Hashable], list[Any]]:
    """Return the keys and values of a call that takes one or a list."""
    if any(not isinstance(name, Hashable) for name in (key if isinstance(key, list) else [key])):
        raise ParameterError(
            f"key = {shown(key)}: give a str, an int or a tuple, or a list of these."
        )
    if not isinstance(key, list):
        return [key], [value]
    if len({*key}) < len(key):
        raise ParameterError(f"{key}: name every key once.")
    if value is None:
        return key, []
    if not isinstance(value, (list, tuple)) or len(value) != len(key):
        found = len(value) if isinstance(value, (list, tuple)) else kind_of(value)
        raise ParameterError(
            f"There are {len(key)} keys: give a list of as many tensors, not {found}."
        )
    return key, list(value)


def new_key_problems(
    names: Sequence[Hashable],
    values: Sequence[Any],
    known: Collection[Hashable],
    make: MakeOptimizer | None,
    means: bool,
) -> list[str]:
    """Return the problems of keys that exist already, and of values that are no tensors of use."""
    problems = [f"The key {name!r} exists already." for name in names if name in known]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor):
            problems.append(f"The value of {name!r} is {kind_of(value)}: give a tensor.")
        elif value.layout != torch.strided:
            problems.append(f"The value of {name!r} is {value.layout}: make it dense first.")
        elif not value.is_floating_point():
            kind = f"The value of {name!r} is {dtype_name(value.dtype)}"
            if means:
                problems.append(f"{kind}, and a mean needs floating-point: use average=False.")
            one = torch.ones(1, dtype=value.dtype)
            if _error_of_step(make, one, one) is not None:
                problems.append(f"{kind}, which the optimizer cannot update: use optimizer=None.")
    return problems


def gradient_problems(specs: Sequence[KeySpec], values: Sequence[Any]) -> list[str]:
    """Return the problems of tensors that do not fit their keys."""
    problems = []
    for spec, value in zip(specs, values, strict=True):
        if not isinstance(value, torch.Tensor):
            problems.append(f"{spec.name!r}: give a tensor, not {kind_of(value)}.")
        elif value.layout != torch.strided:
            problems.append(f"{spec.name!r}: the tensor is {value.layout}: use push_rows for rows.")
        else:
            problems += _fit(spec, spec.shape, value)
    return problems


def row_problems(spec: KeySpec, numbers: torch.Tensor) -> list[str]:
    """Return the problems of numbers that are no rows of a key."""
    if not spec.shape:
        return [f"{spec.name!r} has no dimensions, so it has no rows: push and pull it whole."]
    if numbers.dim() != 1 or numbers.dtype != torch.int64:
        found = f"{dtype_name(numbers.dtype)} {list(numbers.shape)}"
        return [f"{spec.name!r}: the rows are {found}: give their numbers as int64, (n,)."]
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < spec.rows:
        wrong = int(numbers.min() if numbers.min() < 0 else numbers.max())
        return [f"{spec.name!r} has no row {wrong}: its rows are 0 to {spec.rows - 1}."]
    return []


def row_value_problems(spec: KeySpec, numbers: torch.Tensor, values: torch.Tensor) -> list[str]:
    """Return the problem of values that do not fit some rows of a key."""
    return _fit(spec, (len(numbers), *spec.row_shape), values) if numbers.dim() == 1 else []


def _fit(spec: KeySpec, shape: Sequence[int], value: torch.Tensor) -> list[str]:
    wanted = f"{dtype_name(spec.dtype)} {list(shape)}"
    found = f"{dtype_name(value.dtype)} {list(value.shape)}"
    return [] if found == wanted else [f"{spec.name!r} needs {wanted}, not {found}."]
