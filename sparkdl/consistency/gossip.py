"""Gossip: each replica keeps weights of its own, and averages them with those of a few others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.consistency.base import Consistency, conflicts
from sparkdl.errors import known_arguments, nearest, shown
from sparkdl.model.buffers import MEAN
from sparkdl.model.flat import Layout

DISTANCE = "replica_distance"
"""The name of the distance between replicas among the named losses of an iteration."""


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Gossip(Consistency):
    """Each replica steps by itself, then averages its weights with those of some others.

    This is decentralized SGD (Lian et al., "Can Decentralized Algorithms Outperform Centralized
    Algorithms?", 2017), in the order step, then average. The weights of these averages are doubly
    stochastic, so an average changes no mean over all replicas. Each replica keeps its weights and
    the state of its optimizer. The result of the run is the mean of the replicas. So is what is
    validated, kept as the best, and written to checkpoints, which have the replicas as well.

    In each iteration the history has, as ``named_losses["replica_distance"]``, the root mean square
    distance of a replica to those that it averages with, before it does.

    Attributes:
        topology: "ring": with the two neighbours. "exponential": with the one replica that is 1, 2,
            4, ... places before, in turn. "complete": with all others, which is the mean.
    """

    topology: str = "ring"

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.consistency.base.Consistency`, also for the method below."""
        if not isinstance(self.topology, str) or self.topology not in TOPOLOGIES:
            yield (
                f"topology={shown(self.topology)}: use one of {', '.join(TOPOLOGIES)}."
                f"{nearest(str(self.topology), TOPOLOGIES)}"
            )

    def problems_with(self, trainer: Any) -> Iterator[str]:
        yield from conflicts("consistency=Gossip", trainer, _REASONS)


_NOT_COMMON = (
    "there is no gradient or vector of weights that all replicas have in common. Leave one of the two "
    "out."
)
_REASONS = {
    "engine=shuffle": "its tasks have no connections to one another, over which to average. Use "
    'engine="gang", or engine="local" to try it.',
    "local_steps": "leave one of the two out.",
    "compression": _NOT_COMMON,
    "ema": _NOT_COMMON,
    "histograms": _NOT_COMMON,
    "sync_batchnorm": "replicas are apart. Leave one of the two out.",
    "precision=fp16": 'replicas scale no loss. Use precision="bf16".',
    "wire=fp16": 'weights may be too large for it. Use wire="bf16".',
}


def _ring(size: int, iteration: int) -> dict[int, float]:
    places = {1 % size, -1 % size, 0}
    return dict.fromkeys(sorted(places), 1 / len(places))


def _exponential(size: int, iteration: int) -> dict[int, float]:
    if size == 1:
        return {0: 1.0}
    return {0: 0.5, 1 << iteration % (size - 1).bit_length(): 0.5}


def _complete(size: int, iteration: int) -> dict[int, float]:
    return dict.fromkeys(range(size), 1 / size)


TOPOLOGIES: Mapping[str, Callable[[int, int], dict[int, float]]] = {
    "ring": _ring,
    "exponential": _exponential,
    "complete": _complete,
}
"""For each topology, a function of the number of replicas and the iteration. It returns the weight
that a replica gives to the one so many places before it in the ring of all replicas, 0 being itself.
All replicas do alike, so the matrix of the weights is doubly stochastic."""


def averaged_parts(layout: Layout) -> list[slice]:
    """Return the parts of a flat vector that are averaged: parameters, and buffers of rule "mean".

    Each replica keeps its own of all other buffers, and the result has those of replica 0.
    """
    buffers = (s for s in layout.segments if s.kind == "average" and s.rule == MEAN)
    return [slice(0, layout.buffers_start), *(slice(s.start, s.stop) for s in buffers)]


@torch.no_grad()
def mix(
    own: torch.Tensor,
    sent: torch.Tensor,
    heard: Sequence[tuple[float, torch.Tensor]],
    layout: Layout,
) -> float:
    """Average the flat vector of a replica with those of others.

    Differences are added to it, of vectors that are rounded alike. So what rounding takes from one
    replica it gives to another, and the mean of all stays. ``own`` is changed; ``sent`` is the same
    vector as it is sent, which may be rounded. Return the root mean square of the distances to the
    others, over the parameters.
    """
    parts, square = averaged_parts(layout), 0.0
    differences = [(weight, other.to(own.dtype) - sent) for weight, other in heard]
    for weight, difference in differences:
        square += float(difference[parts[0]].square().sum())
        for part in parts:
            own[part].add_(difference[part], alpha=weight)
    return math.sqrt(square / len(heard)) if heard else 0.0


@torch.no_grad()
def add_up(mean: torch.Tensor, vectors: Sequence[torch.Tensor]) -> None:
    """Write the mean of ``vectors`` to ``mean``. They are added in their order."""
    mean.copy_(vectors[0])
    for vector in vectors[1:]:
        mean += vector
    mean /= len(vectors)
