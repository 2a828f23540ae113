"""The tensors of some samples, on a replica's device. Plain torch, no Spark."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparkdl.data.ragged import RowLengths
from sparkdl.model.options import TrainingOptions

CPU = torch.device("cpu")


def to_tensors(arrays: Sequence[np.ndarray], device: torch.device = CPU) -> list[torch.Tensor]:
    """Return the arrays of a batch as tensors on ``device``; signed integers of any width become
    int64.

    They are copied to a GPU from pinned memory, while this thread continues.
    """
    here = [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
    there = _copied(here, device) if device.type == "cuda" else [t.to(device) for t in here]
    return [
        tensor.long() if array.dtype.kind == "i" else tensor
        for array, tensor in zip(arrays, there, strict=True)
    ]


def _copied(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy tensors to a GPU in a stream of copies, which overlaps with the GPU's pending work.

    Work that is launched afterwards waits on the GPU for the copies.
    """
    copies, computing = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        found = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    computing.wait_stream(copies)
    for tensor in found:  # its memory returns to the copy stream only after the computation
        tensor.record_stream(computing)
    return found


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class MiniBatch:
    """The tensors of some samples."""

    inputs: list[torch.Tensor]
    targets: list[torch.Tensor]
    weights: torch.Tensor | None = None  # of each sample; None: all are equal
    masses: torch.Tensor | None = None  # see sparkdl.model.loss.masses_of
    lengths: Sequence[RowLengths | None] = ()  # see sparkdl.data.batches.Batch.lengths

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def weight(self) -> float:
        """Return the weight of this mini-batch: the sum over its samples of weight times mass."""
        if self.weights is None:
            return float(len(self) if self.masses is None else self.masses.sum())
        weights = self.weights.double()
        return float(weights.sum() if self.masses is None else self.masses @ weights.cpu())

    def rows(self, cut: slice | np.ndarray) -> MiniBatch:
        """Return some of the samples, padded to the longest of them."""
        lengths = [None if known is None else known.of_rows(cut) for known in self.lengths]
        tensors = [
            tensor[cut] if known is None else _shortened(tensor[cut], known)
            for tensor, known in itertools.zip_longest([*self.inputs, *self.targets], lengths)
        ]
        return MiniBatch(
            tensors[: len(self.inputs)],
            tensors[len(self.inputs) :],
            None if self.weights is None else self.weights[cut],
            None if self.masses is None else self.masses[cut],
            lengths,
        )

    def parts(self, count: int) -> Iterator[MiniBatch]:
        """Yield up to ``count`` micro-batches of nearly equal size, none of them empty."""
        rows = len(self)
        for i in range(min(count, rows)):
            yield self.rows(slice(rows * i // min(count, rows), rows * (i + 1) // min(count, rows)))


def _shortened(tensor: torch.Tensor, lengths: RowLengths) -> torch.Tensor:
    """Return padded rows without the columns that are padding in all of them."""
    return tensor[:, lengths.places(tensor.shape[1])].contiguous()


def weigh(
    targets: Sequence[torch.Tensor], weights: torch.Tensor | None, options: TrainingOptions
) -> torch.Tensor | None:
    """Return the weight of each sample: its own times that of its class, the first label."""
    if options.class_weights is None:
        return weights
    table = torch.tensor(options.class_weights, dtype=torch.float64, device=targets[0].device)
    # clamped, because a label that is no class may be one that the loss ignores
    of_class = table[targets[0].clamp(0, len(table) - 1)]
    return of_class if weights is None else weights.double() * of_class
