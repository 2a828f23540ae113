"""The smallest configuration of a job, and others made of it."""

from __future__ import annotations

from typing import Any

SMALLEST: dict[str, Any] = {
    "data": {"train": "a.parquet"},
    "model": {"use": "torch.nn:Linear", "in_features": 2, "out_features": 2},
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": {"use": "torch.optim:SGD", "lr": 0.1},
}


def smallest(**changes: Any) -> dict[str, Any]:
    return {**SMALLEST, **changes}
