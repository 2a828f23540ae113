"""The view of a trained model in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.codec.describe import table, titled
from sparkdl.data.fields import Field
from sparkdl.infer.output import Output
from sparkdl.loop.history import History
from sparkdl.loop.history_tables import timings_as_html


def as_html(
    title: str,
    fields: Sequence[Field],
    num_features: int,
    output: Output | None,
    history: History,
) -> str:
    """Return the view: fields, losses and metrics with their curves, and where the time went."""
    rows = [
        (field.name, "feature" if i < num_features else "label", str(field))
        for i, field in enumerate(fields)
    ]
    if output is not None:
        rows.append(("", "output", str(Field("", output.dtype, output.shape))))
    return titled(
        title,
        table(("column", "role", "values"), rows),
        history._repr_html_(),
        timings_as_html(history.timings()),
    )
