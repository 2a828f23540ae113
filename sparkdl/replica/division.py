"""The scaling of a loss before backward, and of its gradients afterwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Division:
    """The factors of losses before backward, and the divisor of gradients afterwards.

    [Note: sums are divided twice] If a loss returns ``(sum, count)``, its count is known after its
    forward pass, and the count of all parts (micro-batches) after the last part's forward pass. So
    the sum of each part is divided by the count of the first part before backward, which keeps
    gradients as large as those of a mean, for fp16. The gradients are then divided by ``scale`` and
    by the ratio of the count of all parts to that of the first. In a gang (``by_rows``) the
    gradients of all ranks are summed while they are computed. There, sums are divided by the rows,
    as if they were means over the rows. The sum over the ranks is multiplied by rows / count before
    it is clipped; the ranks exchange these numbers after the pass.

    Attributes:
        scale: The factor of the loss against underflow.
        share: The factor that the gradient is to have.
        rows: The weight of the rows of all parts.
        by_rows: See the note.
        counted: The count of the parts so far; None as long as the loss returned means.
        unit: The count of the first part.
    """

    scale: float
    share: float
    rows: float
    by_rows: bool
    counted: float | None = None
    unit: float = 0.0

    def factor(self, own: float, count: float | None) -> float:
        """Return the factor of the loss of the next part.

        ``own`` is the part's share of the rows' mean; ``count`` is the count of a sum, or None for
        a mean.
        """
        if count is None:
            return own * self.share * self.scale
        self.counted, self.unit = count + (self.counted or 0.0), self.unit or count
        if self.by_rows:
            return self.share * self.scale / (self.rows or 1.0)
        return self.scale / (self.unit or 1.0)

    @property
    def undo(self) -> float:
        """Return the divisor of gradients. It is valid once the last part has passed forward."""
        if self.counted is None or self.by_rows or not self.unit:
            return self.scale
        return self.scale * (self.counted / self.unit)
