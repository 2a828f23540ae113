"""The messages between the clients and the owners of a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from sparkdl.collectives.key_range import WHOLE, KeySpec
from sparkdl.collectives.operation_order import Kind
from sparkdl.errors import (
    CheckpointError,
    ParameterError,
    SparkdlError,
    StalledError,
    StateLostError,
    TrainingError,
)

ERRORS: tuple[type[SparkdlError], ...] = (
    ParameterError,
    StalledError,
    StateLostError,
    TrainingError,
    CheckpointError,
)
"""The errors that an answer can carry: its first number is 0, or 1 + the error's place here."""


class Message(IntEnum):
    """The kinds of requests. The comments show the numbers and tensors that follow."""

    TURN = 0  # kind, number of keys, keys, number of places, places -> a position for each place
    # if place 0 is one of them, also what the operation says to it, without a position
    MEET = 1  # length of the text; text -> once every rank has said the same
    INIT = 2  # key; values
    PUSH = 3  # position, (key, number of rows or WHOLE) of each; ([rows], values)
    PULL = 4  # position, (key, number of rows or WHOLE) of each; [rows] -> values
    FINISH = 5  # position: the client pushes no more
    OPTIMIZER = 6  # position: use the next optimizer
    BYE = 7  # the last message of a client
    SAVE = 8  # position, length of the text; the path of a file
    LOAD = 9  # position: have the ranges that were read


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options on which all ranks of a parameter server have agreed."""

    synchronous: bool  # a step takes one gradient of every client
    staleness: int | None  # how far clients may be apart; None: any distance
    average: bool  # the gradients of a step are averaged, not summed
    timeout: float  # seconds that a request may wait
    replay: Sequence[int] | None = None


@dataclass
class Request:
    """A request of a client."""

    client: int
    kind: Message
    words: Sequence[int]
    tensors: list[torch.Tensor]
    answer: Callable[[Sequence[int], Sequence[torch.Tensor]], None]
    until: float = field(default=0.0)  # time.monotonic() until which it may wait


def message_of(words: Sequence[int]) -> Message:
    """Return the message of the operation for which a turn is asked."""
    return Message[Kind(words[0]).name]


def places_of(words: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the places of the operation for which a turn is asked, and what it says to place 0."""
    _, keys, *rest = words
    count = rest[keys]
    return rest[keys + 1 : keys + 1 + count], rest[keys + 1 + count :]


def first_line(error: BaseException) -> str:
    """Return the beginning of what an error says."""
    return str(error).partition("\n")[0][:200]


def tensors_of(
    kind: Message, words: Sequence[int], keys: Mapping[int, KeySpec], place: int
) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Yield the shapes and dtypes of the tensors of a message."""
    if kind == Message.TURN:
        places, rest = places_of(words)
        if 0 in places:
            yield from tensors_of(message_of(words), [0, *rest], keys, place)
    elif kind in (Message.MEET, Message.SAVE):
        yield (words[-1],), torch.uint8
    elif kind == Message.INIT:
        yield keys[words[0]].range_shape(place), keys[words[0]].dtype
    elif kind in (Message.PUSH, Message.PULL):
        for key, rows in pairs(words[1:]):
            spec = keys[key]
            if rows != WHOLE:
                yield (rows,), torch.int64
            if kind == Message.PUSH:
                whole = spec.range_shape(place)
                yield whole if rows == WHOLE else (rows, *spec.row_shape), spec.dtype


def pairs(words: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return the key and the number of rows of each gradient or value of an operation."""
    return zip(words[::2], words[1::2], strict=True)
