"""Gradients that leave while backward goes on: the same bytes as those written after it."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.replica import step
from sparkdl.replica.compute import MiniBatch, forward_backward
from sparkdl.replica.iteration import Clock
from sparkdl.replica.step import (
    GradientWriter,
    ReplicaResult,
    not_finite,
    section_maps,
    sections_nbytes,
    take_gradients,
    write_sections,
    writes_early,
)
from sparkdl.slices.spec import slice_specs

WIDTH = 12


class Net(nn.Module):
    """A tied parameter, one that is never used, one that only the first rows use, and a buffer."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.unused = nn.Parameter(torch.ones(70))
        self.sometimes = nn.Parameter(torch.ones(WIDTH))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.sometimes if bool(x[0, 0] > 0) else 1.0
        x = self.norm(torch.tanh(self.one(x) * scale))
        for layer in (self.two, self.one) if self.reentrant else ():
            x = checkpoint(layer, x, use_reentrant=True)
        return self.two(x)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def outcome_of(
    stream: bool, slices: int, scale: float = 1.0, model: Any = Net, **options: Any
) -> tuple[np.ndarray, ReplicaResult, str]:
    """The bytes of all sections, what was made, and what is not finite."""
    live = LiveReplica.of(Recipe(model, loss, torch.optim.SGD, 0, TrainingOptions(**options)))
    assert writes_early(live)
    plans = slice_specs(live.flat.layout, slices)
    maps = section_maps(live, plans, ReplicaResult())
    out = np.full(sum(sections_nbytes(live, plans, maps)), 255, np.uint8)
    writer = GradientWriter(live, plans, maps, out) if stream else None
    x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.linspace(1, -1, 9)
    batch = MiniBatch([x], [torch.ones(9, WIDTH)])
    passed = forward_backward(live, batch, 0, scale, Clock(), writer)
    step = take_gradients(live)
    if writer is not None:
        step = writer.finish(step)
    outcome = ReplicaResult(passed.loss, passed.weight, 9, step)
    sections = write_sections(live, plans, maps, outcome, out)
    assert all(parameter.grad is None for _, parameter in live.flat.parameters)
    content = np.concatenate(
        [t.view(torch.uint8).numpy() for s in sections for t in (s.gradient, s.buffers)]
    )
    return content, outcome, not_finite(live, plans, sections, outcome)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 3},
    "fp16 on the wire": {"wire": "fp16", "scale": 1024.0},
    "bf16": {"wire": "bf16", "precision": "bf16"},
    "checkpointing": {"activation_checkpointing": ("one", "norm")},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "reentrant": {"model": lambda: Net(True)},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bytes_as_written_afterwards(case: str, slices: int, checks: bool) -> None:
    settings = CASES[case]
    before, expected, _ = outcome_of(False, slices, **settings)
    with (
        mock.patch.object(step, "CHECK_FROM", 0 if checks else 1 << 40),
        mock.patch.object(step, "CHUNK", 50),
    ):
        after, found, problem = outcome_of(True, slices, **settings)
    assert np.array_equal(before, after)
    assert found.loss == expected.loss
    assert found.gradients.absent == expected.gradients.absent
    assert expected.gradients.absent  # at least the parameter that nobody uses
    assert (found.gradients.not_finite is not None) == checks
    assert problem == ""


class Spoiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[2].bias.register_hook(lambda gradient: gradient * float("inf"))
        self.layers[1].weight.register_hook(lambda gradient: gradient / 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("slices", [1, 2, 7])
def test_the_first_parameter_that_is_not_finite_is_named(
    stream: bool, checks: bool, slices: int
) -> None:
    with mock.patch.object(step, "CHECK_FROM", 0 if checks else 1 << 40):
        _, _, problem = outcome_of(stream, slices, model=Spoiled)
    assert problem == 'the gradient of "layers.1.weight"'


def test_gradients_leave_one_after_another() -> None:
    """When a layer's gradient is there, that of the layer after it has left its parameter."""
    live = LiveReplica.of(Recipe(Spoiled, loss, torch.optim.SGD, 0))
    left: list[int] = []

    def sink(number: int, gradient: torch.Tensor) -> None:
        left.append(number)
        assert all(parameter.grad is None for _, parameter in live.flat.parameters)

    batch = MiniBatch([torch.ones(2, WIDTH)], [torch.ones(2, WIDTH)])
    forward_backward(live, batch, 0, 1.0, Clock(), sink)
    assert [number // 2 for number in left] == [3, 3, 2, 2, 1, 1, 0, 0]
    assert live.sink is None


def test_what_has_no_known_size_does_not_stream() -> None:
    table = Recipe(lambda: nn.Embedding(5, 3, sparse=True), loss, torch.optim.SGD, 0)
    assert not writes_early(LiveReplica.of(table))
    local = Recipe(Net, loss, torch.optim.SGD, 0, TrainingOptions(local_steps=2))
    assert not writes_early(LiveReplica.of(local))


def test_a_dropped_replica_is_freed_at_once() -> None:

    gc.disable()
    try:
        live = LiveReplica.of(Recipe(Net, loss, torch.optim.SGD, 0))
        flat = weakref.ref(live.flat)
        del live
        assert flat() is None
    finally:
        gc.enable()
