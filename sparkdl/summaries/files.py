"""Files of a history: curves of loss, metrics and learning rate, and the history as CSV or JSON."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.codec.describe import figure_class
from sparkdl.codec.files import path_here
from sparkdl.errors import ParameterError
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import Trigger, every_epoch
from sparkdl.summaries.base import Recorder, check_replaceable, extra_needed, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sparkdl.train.trainer import Trainer

_THIN, _THICK, _RATE = "#a9c4de", "#1f4e79", "#7a7a7a"
_COLOURS = ("#c8553d", "#588157", "#8e5aa8", "#d99a2b", "#2a9d8f", "#8d6e63")


class Curves(Recorder):
    """A callback that draws :func:`plot_history` to a file, which is replaced as a whole.

    The curves of a resumed run include the time before. It needs the extra ``plots``.

    Args:
        path: The file; its suffix (.png, .svg, .pdf, ...) is the format.
        every: The trigger that draws; None is every epoch.

    Raises:
        ParameterError: The extra is not installed, or matplotlib does not know the suffix; or, when
            the fit starts, the file cannot be written.
    """

    def __init__(self, path: str | Path, every: Trigger | None = None) -> None:
        super().__init__(every_epoch() if every is None else every)
        make_figure, _ = _matplotlib("Curves")
        self._path = path_here(path).absolute()  # the callback may run elsewhere
        kinds = make_figure().canvas.get_supported_filetypes()
        if self._path.suffix.lower().removeprefix(".") not in kinds:
            raise ParameterError(
                f'Curves("{path}"): end the name in .png, .svg, .pdf or another kind of file that '
                "matplotlib writes."
            )

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        super().on_fit_start(trainer, state)
        check_replaceable("Curves", self._path)

    def write(self, trainer: Trainer, state: TrainState) -> None:
        with replacing(self._path) as part:
            plot_history(self.history, part)


def plot_history(history: History, path: str | Path | None = None) -> Figure:
    """Draw ``history``, and return the figure, which a notebook shows.

    The horizontal axis is the iterations. The first panel has the loss of each iteration as a thin
    line, the mean of each epoch as a thick one, and the loss of the validations. Other metrics of
    the validations follow: those between 0 and 1 share a panel, and any other has its own. The last
    panel has the learning rate. The function needs the extra ``plots``.

    Args:
        history: The history of a run.
        path: The file to write as well; its suffix (.png, .svg, .pdf, ...) is the format.

    Returns:
        The figure of matplotlib, to be changed or saved again.

    Raises:
        ParameterError: The extra is not installed.
    """
    make_figure, whole_numbers = _matplotlib("plot_history")
    rows, epochs = list(history), history.epochs()
    metrics = _metrics(history)
    losses = metrics.pop("loss", ([], []))
    panels = _panels(metrics)
    figure = make_figure(figsize=(8, 4.5 + 1.8 * len(panels)), dpi=120, layout="constrained")
    heights = [3.2, *[2.2] * len(panels), 1.3]
    top, *middle, bottom = figure.subplots(
        len(heights), sharex=True, gridspec_kw={"height_ratios": heights}
    )
    iterations = [row["iteration"] for row in rows]
    top.plot(iterations, history.losses, lw=0.7, color=_THIN, label="training, iteration")
    means = [epoch["loss"] for epoch in epochs]
    style = {"lw": 2.2, "marker": "o", "ms": 4}
    top.plot(_middles(rows), means, color=_THICK, label="training, mean of an epoch", **style)
    if losses[0]:
        top.plot(*losses, color=_COLOURS[0], label="validation", **style)
    shown = [loss for loss in (*history.losses, *losses[1]) if math.isfinite(loss)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if finite and min(shown) > 0 and max(finite) > 20 * min(finite):
        top.set_yscale("log")
    top.set_ylabel("loss (mean per sample)")
    top.legend(frameon=False)
    colours = itertools.cycle(_COLOURS[1:])
    for axes, names in zip(middle, panels, strict=True):
        for name in names:
            axes.plot(*metrics[name], color=next(colours), label=name, **style)
        axes.set_ylabel("validation")
        axes.legend(frameon=False)
    bottom.plot(iterations, [row["learning_rate"] for row in rows], lw=1.6, color=_RATE)
    bottom.set_ylabel("learning rate")
    batch = max((b["samples"] - a["samples"] for a, b in itertools.pairwise(rows)), default=0)
    bottom.set_xlabel(f"iteration (batches of {batch:,} samples)" if batch else "iteration")
    bottom.xaxis.set_major_locator(whole_numbers())
    for axes in (top, *middle, bottom):
        axes.grid(alpha=0.3)
        axes.margins(x=0.02)
    if epochs:
        _add_epochs(top, max(epoch["iterations"] for epoch in epochs), whole_numbers())
    figure.align_ylabels()
    if path is not None:
        figure.savefig(path)
    return figure


def _metrics(history: History) -> dict[str, tuple[list[int], list[float]]]:
    """Return the iterations and values of each metric, by name, over all validations."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in history.validations:
        for name, value in record["metrics"].items():
            iterations, values = found.setdefault(name, ([], []))
            iterations.append(record["iteration"])
            values.append(value)
    return found


def _panels(metrics: dict[str, tuple[list[int], list[float]]]) -> list[list[str]]:
    """Return the metrics that share a panel, for each panel."""
    shares = [name for name, (_, ys) in metrics.items() if all(0 <= y <= 1 for y in ys)]
    return [*([shares] if shares else []), *([name] for name in metrics if name not in shares)]


def _middles(rows: list[dict[str, Any]]) -> list[float]:
    """Return the middle iteration of each epoch."""
    epochs = [[r["iteration"] for r in group] for _, group in itertools.groupby(rows, _epoch)]
    return [(epoch[0] + epoch[-1]) / 2 for epoch in epochs]


_epoch = operator.itemgetter("epoch")


def _add_epochs(axes: Any, iterations: int, whole_numbers: Any) -> None:
    """Add a second scale, of epochs, at the top."""
    above = axes.secondary_xaxis(
        "top", functions=(lambda i: i / iterations, lambda e: e * iterations)
    )
    above.xaxis.set_major_locator(whole_numbers)
    above.set_xlabel("epoch")


def _matplotlib(what: str) -> tuple[Any, Any]:
    """Return the class of figures, which needs no window, and a maker of whole-number scales."""
    try:
        from matplotlib.ticker import MaxNLocator

        made = figure_class()
    except ImportError:
        raise extra_needed(what, "plots", "matplotlib") from None
    return made, functools.partial(MaxNLocator, integer=True)


class HistoryFile(Recorder):
    """A callback that writes the history to a file at each ``every`` and with each checkpoint.

    It writes :meth:`sparkdl.History.save`, and replaces the file as a whole, so it can be opened at
    any time. The history of a resumed run includes the time before: from the checkpoint, or without
    one from the file that is there.

    Args:
        path: The file, with the suffix .csv or .json.
        every: The trigger that writes; None is every epoch.

    Raises:
        ParameterError: The suffix is another one; or, when the fit starts, the file cannot be
            written.
    """

    def __init__(self, path: str | Path, every: Trigger | None = None) -> None:
        super().__init__(every_epoch() if every is None else every)
        self._path = path_here(path).absolute()  # the callback may run elsewhere
        if self._path.suffix.lower() not in (".csv", ".json"):
            raise ParameterError(f'HistoryFile("{path}"): end the name in .csv or .json.')

    def on_fit_start(self, trainer: Trainer, state: TrainState) -> None:
        super().on_fit_start(trainer, state)
        check_replaceable("HistoryFile", self._path)
        if state.iteration > 0 and not len(self.history) and self._path.is_file():
            self.history = History.load(self._path)
            self.history.truncate(state.iteration)
            self.history.follow(state)

    def on_checkpoint(self, trainer: Trainer, state: TrainState) -> None:
        """Write the file, so that a run that resumes from this checkpoint finds the whole history."""
        self.write(trainer, state)

    def write(self, trainer: Trainer, state: TrainState) -> None:
        with replacing(self._path) as part:
            self.history.save(part)
