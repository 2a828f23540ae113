"""The costs of the written-out collectives, in the usual model of a network.

A message of ``n`` bytes takes ``alpha + n * beta`` seconds between any two ranks. A rank sends one
message and receives one at a time, and does both at once. Summing ``n`` bytes into ``n`` others
takes ``n * gamma``. This is the model of Thakur, Rabenseifner and Gropp (2005) and of Chan et al.
(2007), whose formulas these are, for any number of ranks. They are exact if the vector divides
evenly among the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.collectives.algorithms import ALGORITHMS, power_below


@dataclass(frozen=True)
class Terms:
    """The costs of the critical path."""

    steps: int  # messages, one after another
    volume: float  # their bytes, as a multiple of the vector's
    summed: float  # the bytes that are summed, likewise

    def __add__(self, then: Terms) -> Terms:
        return Terms(self.steps + then.steps, self.volume + then.volume, self.summed + then.summed)


def cost(
    algorithm: str,
    operation: str,
    nbytes: float,
    ranks: int,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
) -> float:
    """Return the seconds of an operation on a whole vector of ``nbytes``.

    A message takes ``alpha`` seconds, a byte ``beta`` to send and ``gamma`` to sum.
    """
    found = terms(algorithm, operation, ranks)
    return found.steps * alpha + nbytes * (found.volume * beta + found.summed * gamma)


def terms(algorithm: str, operation: str, ranks: int) -> Terms:
    """Return the factors of alpha, ``n * beta`` and ``n * gamma``. See :func:`cost`."""
    ALGORITHMS[operation][algorithm]
    if ranks == 1:
        return Terms(0, 0.0, 0.0)
    if algorithm == "halving-doubling":
        return _halving_doubling(operation, ranks)
    if operation == "all_reduce":
        parts = ("reduce_scatter", "all_gather") if algorithm == "ring" else ("reduce", "broadcast")
        first, then = (terms(algorithm, part, ranks) for part in parts)
        return first + then
    sums = operation in ("reduce", "reduce_scatter")
    if algorithm == "ring":
        chain = operation in ("reduce", "broadcast")
        steps = 2 * (ranks - 1) if chain else ranks - 1
        return Terms(steps, steps / ranks, sums * steps / ranks)
    steps = ranks - 1 if algorithm == "linear" else (ranks - 1).bit_length()
    return Terms(steps, float(steps), float(sums * steps))


def _halving_doubling(operation: str, ranks: int) -> Terms:
    """Return the costs of the core, a power of two, and of the steps before and after it.

    With reduce_scatter and all_gather, the first ranks of the core stand for two blocks each. In
    the step at distance ``width`` the longest message then has those of the first ``width`` ranks.
    """
    power = power_below(ranks)
    pairs, levels = ranks - power, power.bit_length() - 1
    whole, fold = Terms(1, 1.0, 0.0), Terms(1, 1.0, 1.0)
    if operation in ("reduce_scatter", "all_gather"):
        widths = [1 << level for level in range(levels)]
        share = sum(width + min(width, pairs) for width in widths) / ranks
        block = Terms(1, 1 / ranks, 0.0)
        if operation == "all_gather":
            core, extra = Terms(levels, share, 0.0), block + whole
        else:
            core, extra = Terms(levels, share, share), fold + block
    else:
        share = (power - 1) / power
        one_way, summing = Terms(levels, share, 0.0), Terms(levels, share, share)
        core, extra = {
            "broadcast": (one_way + one_way, whole),
            "reduce": (summing + one_way, fold),
            "all_reduce": (summing + one_way, fold + whole),
        }[operation]
    return core + extra if pairs else core
