"""Keys of a parameter server, cut into ranges of rows, and the updates of one range."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sparkdl.collectives.halving import even_bounds

WHOLE = -1
"""Stands for the number of rows where an operation has all rows of a range."""
MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def optimizer_name(make: MakeOptimizer | None) -> str:
    """Return the name of an optimizer's class; an empty string if there is none."""
    return "" if make is None else type(make([torch.zeros(1)])).__name__


@dataclass(frozen=True)
class KeySpec:
    """A key: a tensor whose rows, along its first dimension, are shared out to places.

    A *place* is the number of an owner among the owners. The blocks of consecutive keys begin at
    different places, so that keys of few rows do not all lie at the first one.
    """

    name: Hashable
    number: int  # in the order of ParameterServer.init
    shape: torch.Size
    dtype: torch.dtype
    bounds: tuple[int, ...]  # the ends of the blocks of rows

    @staticmethod
    def of(name: Hashable, number: int, value: torch.Tensor, places: int) -> KeySpec:
        """Describe a key whose first value is ``value``."""
        return KeySpec.shared(name, number, value.shape, value.dtype, places)

    @staticmethod
    def shared(
        name: Hashable, number: int, shape: Sequence[int], dtype: torch.dtype, places: int
    ) -> KeySpec:
        """Describe a key whose rows are shared out to so many places."""
        bounds = even_bounds(shape[0] if shape else 1, places)
        return KeySpec(name, number, torch.Size(shape), dtype, tuple(bounds))

    @property
    def rows(self) -> int:
        """Return the number of rows; a tensor without dimensions is one row."""
        return self.bounds[-1]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[1:])

    @property
    def places(self) -> list[int]:
        """Return the places that have at least one row, or one element."""
        return [place for place in range(len(self.bounds) - 1) if self._has_any(place)]

    def range_of(self, place: int) -> slice:
        """Return the rows of a place."""
        block = (place + self.number) % (len(self.bounds) - 1)
        return slice(self.bounds[block], self.bounds[block + 1])

    def range_shape(self, place: int) -> tuple[int, ...]:
        """Return the shape of what a place has."""
        its = self.range_of(place)
        return (its.stop - its.start, *self.row_shape)

    def places_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the place of each row."""
        blocks = torch.searchsorted(torch.tensor(self.bounds), rows, right=True) - 1
        return (blocks - self.number) % (len(self.bounds) - 1)

    def _has_any(self, place: int) -> bool:
        its = self.range_of(place)
        return its.stop > its.start


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its rows along the first dimension, also if it has no dimension."""
    return tensor if tensor.dim() else tensor.view(1)


def places_of(specs: Sequence[KeySpec]) -> list[int]:
    """Return the places that have a row of any of the keys."""
    return sorted({place for spec in specs for place in spec.places})


def parts_at(
    place: int, specs: Sequence[KeySpec], tensors: Sequence[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor]]:
    """Return what an operation on whole keys says to a place, and the rows of each tensor there."""
    here = [(s, its) for s, its in zip(specs, tensors, strict=True) if place in s.places]
    words = [word for spec, _ in here for word in (spec.number, WHOLE)]
    return words, [as_rows(its)[spec.range_of(place)] for spec, its in here]


class Gradient(NamedTuple):
    """A gradient that a client has pushed to a range."""

    values: torch.Tensor
    rows: torch.Tensor | None = None  # counted from the first of the range; None: all


class KeyRange:
    """The rows of a key that one owner has, and their optimizer; without one, pushes are added."""

    def __init__(self, values: torch.Tensor, make: MakeOptimizer | None, average: bool) -> None:
        self.values = values
        self._average = average
        self.use(make)

    def use(self, make: MakeOptimizer | None) -> None:
        """Update with a new optimizer from now on."""
        self._optimizer = None if make is None else make([self.values])

    @property
    def state(self) -> dict[str, Any]:
        """Return the state of the optimizer, which may be changed."""
        return {} if self._optimizer is None else self._optimizer.state[self.values]

    @torch.no_grad()
    def step(self, gradients: Sequence[Gradient]) -> None:
        """Make one step with gradients, which are summed in their order."""
        scale = 1 / len(gradients) if self._average and len(gradients) > 1 else None
        if all(gradient.rows is not None for gradient in gradients):
            rows = torch.cat([gradient.rows for gradient in gradients if gradient.rows is not None])
            values = torch.cat([gradient.values for gradient in gradients])
            self._step_rows(rows, values if scale is None else values * scale)
            return
        total = gradients[0].values if gradients[0].rows is None else self._whole(gradients[0])
        for gradient in gradients[1:]:
            total = total + (gradient.values if gradient.rows is None else self._whole(gradient))
        total = total if scale is None else total * scale
        if self._optimizer is None:
            self.values.add_(total)
        else:
            self._update(self._optimizer, total)

    def _step_rows(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        if self._optimizer is None:
            self.values.index_add_(0, rows, values)
        else:
            shape = self.values.shape
            found = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)
            self._update(self._optimizer, found.coalesce())

    def _whole(self, gradient: Gradient) -> torch.Tensor:
        assert gradient.rows is not None
        return torch.zeros_like(self.values).index_add_(0, gradient.rows, gradient.values)

    def _update(self, optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
        self.values.grad = gradient
        with torch.sparse.check_sparse_tensor_invariants(False):  # else Adagrad's step warns
            optimizer.step()
        self.values.grad = None


class Rounds:
    """The steps of a key to which every client adds one gradient.

    Round ``n`` has the ``n``-th push of each client. Its step is made once every client has pushed
    or finished, with the gradients in rank order, so that its bits do not depend on who comes first.
    """

    def __init__(self, clients: int) -> None:
        self._pushed = [0] * clients
        self._open: list[dict[int, Gradient]] = []
        self._first = 0

    def add(self, client: int, gradient: Gradient) -> None:
        """Add a client's next gradient."""
        number = self._pushed[client] - self._first
        self._pushed[client] += 1
        if number == len(self._open):
            self._open.append({})
        self._open[number][client] = gradient

    def complete(self, active: Sequence[int]) -> list[list[Gradient]]:
        """Remove the rounds that all ``active`` clients have made; return their gradients."""
        found = []
        while self._open and all(self._pushed[client] > self._first for client in active):
            gradients: dict[int, Any] = self._open.pop(0)
            self._first += 1
            found.append([gradients[client] for client in sorted(gradients)])
        return found
