"""State beside parameters and buffers is told; what every pass leaves behind in one way is not."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from dry_runs import dry_run
from mistakes import message_of
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import sparkdl
from sparkdl.errors import ModelError

NAN = float("nan")
INPUTS = torch.arange(12.0).reshape(6, 2)


class Keeps(nn.Module):
    """Has ``value``, of which ``change(module, inputs)`` makes something in each pass in training."""

    def __init__(self, value: Any, change: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.body, self.value, self.change = nn.Linear(2, 2), value, change

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.change(self, inputs)
        return self.body(inputs)


class Plain:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.parts = {"seen": [0]}


def keeping(name: str, value: Any) -> Callable[[Any, torch.Tensor], object]:
    """A change that gives the module an attribute."""
    return lambda module, inputs: setattr(module, name, value(module, inputs))


def mean(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    return 0.9 * module.value + 0.1 * inputs.mean(0)


def once(module: Any, inputs: torch.Tensor) -> None:
    """A constant made at the first call, as of a buffer that was registered as None."""
    if module.value is None:
        module.value = torch.linspace(0, 1, 7)
        module.register_buffer("late", torch.ones(3))


def count_in(module: Any, inputs: torch.Tensor) -> None:
    module.value.parts["seen"][0] += len(inputs)


def count_late(module: Any, inputs: torch.Tensor) -> None:
    """In a buffer that an engine knows nothing of."""
    late = getattr(module, "late", None)
    module.register_buffer("late", torch.ones(()) if late is None else late + 1)


STATE = {
    "a counter": (0, keeping("value", lambda m, x: m.value + 1)),
    "a number": (1.0, keeping("value", lambda m, x: m.value * 0.99)),
    "an iterator that counts": (itertools.count(), lambda m, x: next(m.value)),
    "a running mean": (torch.zeros(2), keeping("value", mean)),
    "a running mean in place": (torch.zeros(2), lambda m, x: m.value.add_(x.mean(0))),
    "an array": (np.zeros(2), lambda m, x: m.value.__iadd__(1)),
    "a list": ([], lambda m, x: m.value.append(float(x.mean()))),
    "an object's": (Plain(), count_in),
    "hidden state": (torch.zeros(6, 2), keeping("value", lambda m, x: torch.tanh(m.value + x))),
    "a generator of torch": (torch.Generator(), lambda m, x: torch.rand(2, generator=m.value)),
    "a generator of numpy": (np.random.default_rng(0), lambda m, x: m.value.random()),
    "an old generator of numpy": (np.random.RandomState(0), lambda m, x: m.value.rand()),
    "a generator of random": (random.Random(0), lambda m, x: m.value.random()),
    "a buffer that comes late": (None, count_late),
}
NONE = {
    "nothing": (None, lambda m, x: None),
    "a constant made at the first call": (None, once),
    "the last activations": (None, keeping("value", lambda m, x: x * 2)),
    "the last draws": (None, keeping("value", lambda m, x: torch.rand(3) + np.random.rand())),
    "whether it was called": (False, keeping("value", lambda m, x: True)),
    "a cache by size": ({}, lambda m, x: m.value.update({len(x): torch.arange(len(x))})),
    "a function": (None, keeping("value", lambda m, x: lambda: x)),
    "NaN": (None, keeping("value", lambda m, x: float("nan"))),
}


def mean_of(output: Any) -> torch.Tensor:
    return output.square().mean()


def check(module: nn.Module, loss: Any = mean_of, replicas: int = 1) -> None:
    dry_run(module, loss, [INPUTS.numpy()], replicas=replicas)


@pytest.mark.parametrize("name", STATE)
def test_state_is_told(name: str) -> None:
    value, change = STATE[name]
    module = nn.Sequential(nn.Identity(), Keeps(value, change))
    with pytest.raises(ModelError) as caught:
        check(module)
    place = "1.late" if "late" in name else "1.value"
    remedy = (
        "Use the global generators of torch, numpy or random, which are seeded."
        if "generator" in name
        else (
            "If the model needs it, make it a buffer: call register_buffer with a tensor in "
            "__init__, and change that in forward. If it does not, as with a measured time, remove "
            f'it, or list it in the module\'s class: sparkdl_no_state = ("{place[2:]}",).'
        )
    )
    assert str(caught.value) == (
        f'forward changes "{place}" in each pass, but it is neither a parameter nor a buffer that '
        "has a tensor from the start: each worker would have its own value, and the trained model "
        f"would have none. {remedy}"
    )


class Timed(Keeps):
    sparkdl_no_state = ("value",)


def test_what_a_class_says_is_no_state_is_none() -> None:
    check(nn.Sequential(Timed(0.0, keeping("value", lambda m, x: time.perf_counter()))))
    with pytest.raises(ModelError, match=r'forward changes "0\.other"'):
        check(nn.Sequential(Timed(0.0, keeping("other", lambda m, x: time.perf_counter()))))


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_state_is_not(name: str) -> None:
    check(nn.Sequential(Keeps(*NONE[name])))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout()),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 1)), nn.LSTM(1, 2, batch_first=True), First()),
        lambda: weight_norm(nn.Linear(2, 2)),
        lambda: spectral_norm(nn.Linear(2, 2)),
        lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
        lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU()).append(nn.GRUCell(4, 2)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_layers_of_torch_have_none(make: Callable[[], nn.Module]) -> None:
    check(make())


class First(nn.Module):
    def forward(self, both: Any) -> Any:
        return both[0]


class Rotary(nn.Module):
    """A cache of positions, made anew where a sequence is longer."""

    def __init__(self, persistent: bool, length: int = 4) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.register_buffer("cache", torch.arange(length), persistent=persistent)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > len(self.cache):
            self.cache = torch.arange(len(inputs))
        return self.body(inputs) + self.cache[: len(inputs), None]


def test_a_cache_may_grow_if_it_is_no_part_of_the_state() -> None:
    check(nn.Sequential(Rotary(persistent=False)))
    check(Rotary(persistent=True, length=6))
    assert message_of(ModelError, check, nn.Sequential(Rotary(persistent=True))) == (
        'forward makes the buffer "0.cache" [6] int64, but __init__ made it [4] int64: replicas '
        "exchange buffers, so their shape and type must not change. Give it its final "
        "form in __init__ (for the longest input, say). If it is only a cache, register it with "
        "persistent=False."
    )


class Centered(nn.Module):
    """Two parts have one buffer, into which the second writes, or which it replaces."""

    def __init__(
        self, write: Callable[[Any, torch.Tensor], object], persistent: bool = True
    ) -> None:
        super().__init__()
        self.first, self.second, self.write = nn.Linear(2, 2), nn.Linear(2, 2), write
        self.first.register_buffer("center", torch.zeros(2), persistent=persistent)
        self.second.register_buffer("center", self.first.center, persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x.detach().mean(0))
        return self.second(self.first(x) - self.first.center) + self.second.center


def replace_one(m: Any, mean: torch.Tensor) -> None:
    m.second.center = m.second.center.lerp(mean, 0.1)


def replace_both(m: Any, mean: torch.Tensor) -> None:
    m.first.center = m.second.center = m.second.center.lerp(mean, 0.1)


def test_a_shared_buffer_stays_one() -> None:
    check(Centered(lambda m, mean: m.second.center.lerp_(mean, 0.1)))
    check(Centered(replace_both))
    check(Centered(replace_one, persistent=False))
    assert message_of(ModelError, check, nn.Sequential(Centered(replace_one))) == (
        '__init__ makes "0.first.center" and "0.second.center" one buffer, and forward assigns another '
        "tensor to one of them: replicas and checkpoints carry one value for both. Write into it "
        "instead (self.center.copy_(...)), or make two buffers in __init__."
    )


class Annealed(nn.Module):
    sparkdl_buffers: ClassVar = {"center": "mean"}  # of a loss it says nothing

    def __init__(self, buffer: str = "") -> None:
        super().__init__()
        self.calls, self.own = 0, buffer
        self.register_buffer("weight", torch.tensor([1.0, NAN]))
        self.register_buffer("center", torch.zeros(2))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))
        self.norm = nn.BatchNorm1d(2, affine=False)

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.own == "center":  # another tensor
            self.center = self.center.lerp(output.detach().mean(0), 0.1)
        elif self.own == "ready":  # by the first call alone
            self.ready.fill_(True)
        return (self.norm(output) - self.center).square().mean() / self.calls


def test_state_of_the_loss_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check(nn.Linear(2, 2), lambda output: nn.MSELoss()(output, output * 0))
    assert not caplog.records
    check(nn.Linear(2, 2), Annealed())
    assert [record.getMessage() for record in caplog.records] == [
        f'the loss changes its "{name}" in each call, and each worker has its own copy. If the '
        "value of the loss depends on it, keep it in a buffer of the model and let the model "
        "return it."
        for name in ("modules", "calls")
    ]


class Holds:
    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return self.loss(output)


def enclosed(loss: Any) -> Any:
    return lambda output: loss(output)


@pytest.mark.parametrize("buffer", ["center", "ready"])
@pytest.mark.parametrize(
    "held",
    [
        lambda loss: loss,
        lambda loss: nn.Sequential(nn.Identity(), loss),
        sparkdl.PerReplica,
        partial,
        lambda loss: partial(enclosed(loss)),
        enclosed,
        Holds,
        lambda loss: loss.forward,
    ],
)
def test_a_loss_that_changes_its_buffers_is_refused(held: Any, buffer: str) -> None:
    loss = held(Annealed(buffer))
    name = f"1.{buffer}" if isinstance(loss, nn.Sequential) else buffer
    assert message_of(ModelError, check, nn.Linear(2, 2), loss) == (
        f'the loss changes its buffer "{name}", which each worker would do with a copy of its own. '
        "Make the loss a part of the model, whose buffers replicas agree on (see buffers= of the "
        "trainer): assign it in __init__, as self.criterion, and give step=, a function of module "
        "and batch that calls module.criterion, instead of loss=."
    )


class OfFirstRows(nn.Module):
    """Makes something at its first call; ``made`` says what, ``where`` what it is kept as."""

    def __init__(
        self, made: Callable[[torch.Tensor], torch.Tensor], where: str, once: bool
    ) -> None:
        super().__init__()
        self.linear, self.made, self.once = nn.Linear(2, 2), made, once
        self.plain = None
        self.register_buffer("buffer", None)
        self.register_buffer("passing", None, persistent=False)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, self.where) is None or not self.once:
            setattr(self, self.where, self.made(x.detach()))
        return self.linear(x) * getattr(self, self.where)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x.abs().mean(0)


@pytest.mark.parametrize("where", ["plain", "buffer", "passing"])
@pytest.mark.parametrize(
    ("made", "once", "told"),
    [(scale, True, True), (torch.ones_like, True, False), (scale, False, False)],
    ids=["of its rows", "of any rows", "of each pass"],
)
def test_what_is_made_of_the_first_rows_is_told(
    where: str, made: Callable[[torch.Tensor], torch.Tensor], once: bool, told: bool
) -> None:
    build = partial(OfFirstRows, made, where, once)
    outcome = pytest.raises(ModelError, match=f'makes "{where}" from the rows of its first call')
    with outcome if told else contextlib.nullcontext():
        dry_run(build(), mean_of, [INPUTS.numpy() + 1], build=build)


class RunningMean(OfFirstRows):
    """Begins with the mean of the first rows, so that passes over the same rows do not change it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, old = x.detach().mean(0), getattr(self, self.where)
        setattr(self, self.where, mean if old is None else old.lerp(mean, 0.1))
        return self.linear(x - getattr(self, self.where))


@pytest.mark.parametrize("where", ["plain", "buffer", "passing"])
def test_a_running_mean_that_begins_with_none_is_told(where: str) -> None:
    build = partial(RunningMean, scale, where, False)
    with pytest.raises(ModelError, match=f'forward changes "{where}" in each pass'):
        dry_run(build(), mean_of, [INPUTS.numpy() + 1], build=build)
