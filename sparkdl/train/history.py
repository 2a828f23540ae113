"""What happened, iteration by iteration."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkdl.train.state import TrainState


class History:
    """Loss, samples, learning rate and seconds of every iteration, a few bytes each."""

    def __init__(self) -> None:
        self._epoch = array("q")
        self._samples = array("q")
        self._loss = array("d")
        self._rate = array("d")
        self._seconds = array("d")

    def append(self, state: TrainState, epoch: int) -> None:
        """Record an iteration; ``epoch`` is the one it belongs to, from 1."""
        self._epoch.append(epoch)
        self._samples.append(state.samples)
        self._loss.append(state.loss)
        self._rate.append(state.learning_rates[0] if state.learning_rates else float("nan"))
        self._seconds.append(state.seconds)

    def __len__(self) -> int:
        return len(self._loss)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One record an iteration, from 1: iteration, epoch, loss, learning_rate (of the first
        parameter group), samples (seen so far) and seconds (since the start)."""
        rows = zip(self._epoch, self._loss, self._rate, self._samples, self._seconds, strict=True)
        for i, (epoch, loss, rate, samples, seconds) in enumerate(rows):
            yield {
                "iteration": i + 1,
                "epoch": epoch,
                "loss": loss,
                "learning_rate": rate,
                "samples": samples,
                "seconds": seconds,
            }

    @property
    def losses(self) -> list[float]:
        """The loss of each iteration."""
        return list(self._loss)

    def epochs(self) -> list[dict[str, Any]]:
        """One record an epoch: epoch, mean loss over its samples, iterations, seconds it took."""
        records: list[dict[str, Any]] = []
        seen, clock = 0, 0.0
        for row in self:
            if not records or records[-1]["epoch"] != row["epoch"]:
                records.append(
                    {
                        "epoch": row["epoch"],
                        "loss": 0.0,
                        "iterations": 0,
                        "samples": 0,
                        "seconds": 0.0,
                    }
                )
            record, count = records[-1], row["samples"] - seen
            record["loss"] += row["loss"] * count
            record["samples"] += count
            record["iterations"] += 1
            record["seconds"] += row["seconds"] - clock
            seen, clock = row["samples"], row["seconds"]
        for record in records:
            record["loss"] /= max(record["samples"], 1)
        return records

    def save(self, path: str | Path) -> None:
        """Write ``{"iterations": [...], "epochs": [...]}`` as JSON."""
        content = {"iterations": list(self), "epochs": self.epochs()}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> History:
        """Read what :meth:`save` wrote."""
        history = History()
        for row in json.loads(Path(path).read_text())["iterations"]:
            state = TrainState(
                loss=row["loss"],
                samples=row["samples"],
                seconds=row["seconds"],
                learning_rates=(row["learning_rate"],),
            )
            history.append(state, row["epoch"])
        return history
