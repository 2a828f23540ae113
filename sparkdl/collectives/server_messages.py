"""The messages between the clients and the owners of a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from sparkdl.errors import (
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


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options on which all ranks of a parameter server have agreed.

    Attributes:
        synchronous: Whether a step takes one gradient of every client.
        staleness: How far clients may be apart, or None.
        average: Whether the gradients of a step are averaged, not summed.
        timeout: The seconds that a request may wait.
        replay: The order to repeat, or None.
    """

    synchronous: bool
    staleness: int | None
    average: bool
    timeout: float
    replay: Sequence[int] | None = None


@dataclass
class Request:
    """A request of a client.

    Attributes:
        client: Its rank.
        kind: What it asks for.
        words: The numbers of the message.
        tensors: The tensors of the message.
        answer: Sends numbers and tensors back.
        until: The time until which it may wait.
    """

    client: int
    kind: Message
    words: Sequence[int]
    tensors: list[torch.Tensor]
    answer: Callable[[Sequence[int], Sequence[torch.Tensor]], None]
    until: float = field(default=0.0)
