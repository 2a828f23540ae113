"""A small network on two samples, and comparisons: for what consistency models compute."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from pyspark import cloudpickle
from torch import nn

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
SAMPLES = [([1.0, 0.5, -1.0], [1.0]), ([-0.5, 2.0, 0.3], [-1.0])]
"""The sample of each replica, of which it has copies alone, so that their order does not count."""


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether all parameters and buffers are equal to the bit."""
    here, there = one.state_dict(), other.state_dict()
    return here.keys() == there.keys() and all(torch.equal(here[k], there[k]) for k in here)


def close(one: nn.Module, other: nn.Module, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Assert that all parameters and buffers are equal but for rounding."""
    here, there = one.state_dict(), other.state_dict()
    assert here.keys() == there.keys()
    for name, found in here.items():
        torch.testing.assert_close(found, there[name], rtol=rtol, atol=atol)


class LosesSlabs(sparkdl.Callback):
    """Deletes all slabs after iteration ``at``, and counts recoveries."""

    def __init__(self, slabs: Callable[..., list[str]], at: int) -> None:
        self.slabs, self.at, self.recoveries = slabs, at, 0

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        if state.iteration == self.at:
            for root in self.slabs():
                shutil.rmtree(root)

    def on_recovery(self, trainer: Any, state: Any) -> None:
        self.recoveries += 1
