"""Figures of matplotlib that a notebook shows by themselves."""

from __future__ import annotations

import io
from typing import Any


def figure_class() -> Any:
    """Return a class of figures that needs no window and no pyplot; ImportError: no matplotlib."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            with io.BytesIO() as file:
                self.savefig(file, format="png")
                return file.getvalue()

    return ShownFigure
