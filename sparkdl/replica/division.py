"""How a loss is scaled before backward, and its gradients afterwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Division:
    """What losses are multiplied by before backward, and gradients divided by afterwards.

    [Note: sums are divided twice] What a loss that returns ``(sum, count)`` counts is known after its
    forward pass, and of all parts after that of the last. So the sum of each part is divided by the
    count of the first one before backward, which leaves gradients as large as those of a mean, for
    fp16; and gradients once more, together with ``scale``, by how many times that all parts count. In
    a gang, ``by_rows``, all ranks' gradients are summed while they are made: there sums are divided by
    the rows, as if they were means over these, and the sum over the ranks is multiplied by
    rows / count, which the ranks tell each other after the pass, before it is clipped.

    ``rows``: what those of all parts weigh; ``counted``: what they count for so far, of sums.
    """

    scale: float
    share: float
    rows: float
    by_rows: bool
    counted: float | None = None
    unit: float = 0.0

    def factor(self, own: float, count: float | None) -> float:
        """Of the loss of the next part: a mean, which is ``own`` of the rows' mean, or a sum."""
        if count is None:
            return own * self.share * self.scale
        self.counted, self.unit = count + (self.counted or 0.0), self.unit or count
        if self.by_rows:
            return self.share * self.scale / (self.rows or 1.0)
        return self.scale / (self.unit or 1.0)

    @property
    def undo(self) -> float:
        """What gradients are divided by, once the last part has been forward."""
        if self.counted is None or self.by_rows or not self.unit:
            return self.scale
        return self.scale * (self.counted / self.unit)
