"""The work of a model's modules, its division into pipeline stages, and that of rows. Plain torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sparkdl.model.preparation import modes_kept
from sparkdl.parallel.tensor import without_fused_layers
from sparkdl.parallel.trace import Items

OPERATION = 1.0
"""The cost of a module besides its multiplications, in floating-point operations. It is very small, and
only makes modules without multiplications spread evenly."""


def costs_of(
    module: nn.Module, items: Items, inputs: Sequence[torch.Tensor]
) -> tuple[list[float], list[object]]:
    """Return the floating-point operations and the output of each module of the chain."""
    costs, outputs = [], []
    value: object = inputs[0] if len(inputs) == 1 else tuple(inputs)
    with modes_kept(module), torch.no_grad(), _plain_operations():
        module.eval()
        for _, item in items:
            with FlopCounterMode(display=False) as counter:
                value = item(value)
            costs.append(counter.get_total_flops() + OPERATION)
            outputs.append(value)
    return costs, outputs


@contextlib.contextmanager
def _plain_operations() -> Iterator[None]:
    """Replace attention and recurrent layers in the block by plain multiplications.

    These can be counted: torch's counter counts fused ones (a transformer layer in evaluation, an
    LSTM) as nothing.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with without_fused_layers(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mkldnn.enabled = before


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Divide a sequence into contiguous parts so that the most costly part is as cheap as possible.

    Return the beginning of each part, none of which is empty. Of several such divisions, return one
    whose earlier parts are shorter.
    """
    count, sums = len(costs), [0.0, *itertools.accumulate(costs)]
    best = [[sums[stop] if stop else float("inf") for stop in range(count + 1)]]
    cuts: list[list[int]] = [[0] * (count + 1)]
    for part in range(1, parts):
        row, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for stop in range(part + 1, count + 1):
            for start in range(part, stop):
                cost = max(best[-1][start], sums[stop] - sums[start])
                if cost < row[stop]:
                    row[stop], cut[stop] = cost, start
        best.append(row)
        cuts.append(cut)
    starts, stop = [], count
    for part in reversed(range(parts)):
        stop = cuts[part][stop]
        starts.append(stop)
    return starts[::-1]


def micro_batches(rows: int, accumulate: int, count: int) -> list[tuple[int, int, int]]:
    """Divide the rows of a mini-batch into runs of equal micro-batches.

    Each of the ``accumulate`` parts of a mini-batch becomes ``count`` micro-batches, or fewer if it
    has fewer rows. They are two runs if the rows do not divide evenly. A run is (first row, rows of
    each micro-batch, number of micro-batches).
    """
    parts, found = min(accumulate, rows), list[tuple[int, int, int]]()
    for i in range(parts):
        start, stop = rows * i // parts, rows * (i + 1) // parts
        many = min(count, stop - start)
        each, larger = divmod(stop - start, many)
        if larger:
            found.append((start, each + 1, larger))
        found.append((start + larger * (each + 1), each, many - larger))
    return found
