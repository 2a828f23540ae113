"""Optimizers on slices: the same weights as plain torch gives the whole module.

A new optimizer earns all of these tests by a row in ``ROWS``. No Spark here: slices are driven
directly, their state pickled between two steps as between two versions.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from launch import in_turn
from mistakes import message_of
from noisy import Noisy
from own_optimizers import OddSizes, Rounded, ScheduleFree, by_role
from torch import nn, optim
from torch.optim import lr_scheduler

import sparkdl.optim
from sparkdl.errors import ModelError
from sparkdl.loop.schedule import Schedule
from sparkdl.loop.state import TrainState
from sparkdl.model.flat import FlatModule
from sparkdl.model.recipe import Recipe
from sparkdl.slices.optimizer import OptimizerSpec, build_optimizers
from sparkdl.slices.optimizer_probe import probe_cut_rule
from sparkdl.slices.optimizer_step import evaluated_weights, step_slice
from sparkdl.slices.spec import SliceSpec, SliceState, pack, slice_specs, unpack

pytestmark = pytest.mark.parity

STEPS = 8
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Embedded(nn.Module):
    """Two tables with sparse gradients before and after a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(23, 3, sparse=True)
        self.layer = nn.Linear(9, 4)
        self.items = nn.EmbeddingBag(9, 6, sparse=True)


class Wide(nn.Module):
    """Tensors with fewer elements than 4,096, and with more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 900)
        self.last = nn.Linear(900, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))


def by_hand(module: nn.Module) -> list[optim.Optimizer]:
    """Two optimizers that a function returns; ``last`` is in neither and stays."""
    return [
        optim.SGD(module.first.parameters(), lr=0.1, momentum=0.9),
        optim.Adam([module.scale, *module.norm.parameters()], lr=0.01),
    ]


@dataclass(frozen=True)
class Row:
    """An optimizer; whether it needs ``whole`` tensors, or all in one slice; its module."""

    make: Any
    whole: bool = False
    single: bool = False
    net: Callable[[], nn.Module] = OddSizes


ROWS: dict[str, Row] = {
    "SGD": Row(partial(optim.SGD, lr=0.1)),
    "SGD, default lr": Row(optim.SGD),
    "SGD, momentum": Row(partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1)),
    "SGD, Nesterov": Row(partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "SGD, weight decay, maximize": Row(partial(optim.SGD, lr=0.1, weight_decay=0.1, maximize=True)),
    "Adam": Row(partial(optim.Adam, lr=0.01)),
    "Adam, AMSGrad": Row(partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1)),
    "Adam, foreach": Row(partial(optim.Adam, lr=0.01, foreach=True)),
    "Adam, fused": Row(partial(optim.Adam, lr=0.01, fused=True)),
    "AdamW": Row(partial(optim.AdamW, lr=0.01, weight_decay=0.1)),
    "AdamW, fused": Row(partial(optim.AdamW, lr=0.01, fused=True)),
    "AdamW, partial of a partial": Row(
        partial(partial(optim.AdamW, lr=0.5, betas=(0.8, 0.9)), lr=0.01)
    ),
    "RMSprop": Row(partial(optim.RMSprop, lr=0.01)),
    "RMSprop, centered, momentum": Row(
        partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.9)
    ),
    "Adagrad": Row(partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1)),
    "Adagrad, fused": Row(partial(optim.Adagrad, lr=0.1, fused=True)),
    "Adadelta": Row(partial(optim.Adadelta, lr=1.0)),
    "Adamax": Row(partial(optim.Adamax, lr=0.01)),
    "NAdam": Row(partial(optim.NAdam, lr=0.01)),
    "RAdam": Row(partial(optim.RAdam, lr=0.1)),
    "ASGD": Row(partial(optim.ASGD, lr=0.1, t0=2)),
    "Rprop": Row(partial(optim.Rprop, lr=0.01)),
    "Ftrl": Row(partial(sparkdl.optim.Ftrl, lr=0.5, l1=0.05, l2=0.1, l2_shrinkage=0.01)),
    "LARS": Row(partial(sparkdl.optim.LARS, lr=1.0, trust=0.1, weight_decay=0.1), whole=True),
    "LAMB": Row(partial(sparkdl.optim.LAMB, lr=0.01, weight_decay=0.1), whole=True),
    "LAMB, not adapting": Row(partial(sparkdl.optim.LAMB, lr=0.01, adapt=False)),
    "Adafactor": Row(partial(optim.Adafactor, lr=0.1), whole=True),
    "schedule-free": Row(partial(ScheduleFree, lr=0.1)),
    "schedule-free, groups": Row(by_role(ScheduleFree, beta=0.5)),
    "rounded, small tensors": Row(partial(Rounded, lr=0.1)),
    "rounded, large tensors": Row(partial(Rounded, lr=0.1), whole=True, net=Wide),
    "LBFGS": Row(partial(optim.LBFGS, lr=0.1, max_iter=1, history_size=3), whole=True, single=True),
    "groups of SGD, one with momentum": Row(by_role(optim.SGD, momentum=0.9)),
    "groups of AdamW": Row(by_role(optim.AdamW, weight_decay=0.5, betas=(0.5, 0.9))),
    "groups of Adam, one AMSGrad": Row(by_role(optim.Adam, amsgrad=True)),
    "SGD and Adam by name": Row(
        {
            "first": partial(optim.SGD, lr=0.1, momentum=0.9),
            "*.bias": partial(optim.RMSprop, lr=0.01),
            "": partial(optim.Adam, lr=0.01),
        }
    ),
    "a list of optimizers": Row(by_hand),
    "a count in the group": Row(lambda module: InGroups(module.parameters(), lr=0.1)),
    "a count that is a tensor of the group": Row(
        lambda module: InTensors(module.parameters(), lr=0.1)
    ),
    "LAMB and SGD by name": Row(
        {"first": partial(sparkdl.optim.LAMB, lr=0.1), "": partial(optim.SGD, lr=0.1)}, whole=True
    ),
    "SGD on tables": Row(partial(optim.SGD, lr=0.1), net=Embedded),
    "SGD with momentum on tables": Row(partial(optim.SGD, lr=0.1, momentum=0.9), net=Embedded),
    "Adagrad on tables": Row(partial(optim.Adagrad, lr=0.1), net=Embedded),
    "SparseAdam and Adam": Row(
        {
            "users": partial(optim.SparseAdam, lr=0.1),
            "items.weight": partial(optim.SparseAdam, lr=0.01),
            "layer": partial(optim.Adam, lr=0.01),
        },
        net=Embedded,
    ),
}
if hasattr(optim, "Muon"):
    ROWS["Muon and AdamW by name"] = Row(
        {"first.weight": optim.Muon, "last": optim.Muon, "": partial(optim.AdamW, lr=0.01)},
        whole=True,
    )


def make_net(row: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return ROWS[row].net().to(dtype)


SOMETIMES, NEVER = 1, 3
"""Numbers of parameters: the one has no gradient now and then (at first, too), the other never."""


def absent_in(step: int) -> frozenset[int]:
    return frozenset({NEVER, SOMETIMES} if step in (0, 3) else {NEVER})


def gradients(flat: FlatModule, step: int) -> list[torch.Tensor | None]:
    """By number; sparse ones for tables. All is from one draw, whatever the slices."""
    generator = torch.Generator().manual_seed(step)
    found: list[torch.Tensor | None] = []
    for segment, parameter in flat.parameters:
        drawn = torch.randn(segment.shape, generator=generator, dtype=parameter.dtype)
        if segment.sparse:
            kept = (torch.arange(segment.shape[0]) + step) % 4 == 0
            drawn = (drawn * kept[:, None]).to_sparse(1)
        found.append(drawn)
    return [None if i in absent_in(step) else gradient for i, gradient in enumerate(found)]


def recipe_of(module: nn.Module, make: Any) -> Recipe:
    return Recipe(module, torch.square, make, 0)


def spec_of(module: nn.Module, make: Any, parameters: list[nn.Parameter]) -> OptimizerSpec:
    """The optimizers of ``module``, tried."""
    spec = OptimizerSpec.of(recipe_of(module, make), parameters, module)
    return probe_cut_rule(spec, parameters, module)


def on_the_whole(module: nn.Module, make: Any, schedule: Any = None) -> None:
    """Plain torch, as its documentation has it."""
    flat = FlatModule(copy.deepcopy(module))  # for the order and the kinds of gradients only
    named = dict(module.named_parameters())
    optimizers = [optimizer for _, optimizer in build_optimizers(recipe_of(module, make), module)]
    for optimizer in optimizers:
        getattr(optimizer, "train", int)()
    schedulers = [schedule(optimizer) for optimizer in optimizers] if schedule else []
    for step in range(STEPS):
        for (segment, _), gradient in zip(flat.parameters, gradients(flat, step), strict=True):
            named[segment.name].grad = gradient
        for optimizer in optimizers:
            if isinstance(optimizer, optim.LBFGS):
                optimizer.step(lambda: torch.tensor(1.0))
            else:
                optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    for optimizer in optimizers:
        getattr(optimizer, "eval", int)()


def of_slice(
    plan: SliceSpec, flat: FlatModule, found: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """The slice's part of the gradients: dense, and rows of its pieces of tables."""
    whole = torch.full_like(flat.flat, float("nan"))  # what is absent must not be looked at
    rows = {}
    for (segment, _), gradient in zip(flat.parameters, found, strict=True):
        if gradient is not None and not segment.sparse:
            whole[segment.start : segment.stop] = gradient.reshape(-1)
    for fragment in plan.tables:
        gradient = found[fragment.number]
        if gradient is not None:
            numbers = gradient.coalesce().indices()[0] - fragment.first_row
            inside = (numbers >= 0) & (numbers < fragment.shape[0])
            rows[fragment.number] = numbers[inside], gradient.coalesce().values()[inside]
    return whole[plan.start : plan.start + plan.dense_length], rows


def on_slices(
    module: nn.Module,
    make: Any,
    slices: int,
    hyperparameters: Callable[[int], Any] = lambda step: None,
) -> OptimizerSpec:
    """The same steps, slice by slice; the weights are brought back into ``module``."""
    flat = FlatModule(module)
    parameters = [p for _, p in flat.parameters]
    optimizer = spec_of(module, make, parameters)
    plans = slice_specs(flat.layout, slices, whole=not optimizer.elementwise)
    states = [SliceState(flat.flat[plan.start : plan.stop].clone()) for plan in plans]
    for step in range(STEPS):
        found = gradients(flat, step)
        values = hyperparameters(step)
        for plan, state in zip(plans, states, strict=True):
            state.held, state.others = unpack(pack(state))
            state.arrays = {name: array.clone() for name, array in state.arrays.items()}
            dense, rows = of_slice(plan, flat, found)
            loss = torch.tensor(1.0)
            step_slice(plan, state, dense, absent_in(step), optimizer, values, rows, loss)
    evaluated = [
        evaluated_weights(plan, state, optimizer) if optimizer.evaluates else state.weights
        for plan, state in zip(plans, states, strict=True)
    ]
    flat.flat.copy_(torch.cat(evaluated))
    return optimizer


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest relative difference of a parameter or a buffer."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    found = [(a - b).abs().max() / b.abs().max().clamp(min=1e-9) for a, b in pairs]
    return float(torch.stack(found).max())  # NaN where one is


CUTS = [(2, torch.float64), (7, torch.float64), (5, torch.float32)]
"""Numbers of slices, and what is computed in."""


@pytest.mark.parametrize(("row", "cut"), in_turn(ROWS, CUTS), ids=str)
def test_slices_get_the_weights_of_the_whole(row: str, cut: tuple[int, torch.dtype]) -> None:
    """A trial finds out what the row says of its optimizer."""
    (slices, dtype), one = cut, ROWS[row]
    module = make_net(row, dtype)
    whole = copy.deepcopy(module)
    on_the_whole(whole, one.make)
    assert difference(module, whole) > 1e-4  # it did train
    spec = on_slices(module, one.make, 1 if one.single else slices)
    tolerance = 1e-5 if "Muon" in row else TOLERANCE[dtype]  # Muon computes in bfloat16
    tolerance = 0.0 if "rounded" in row else tolerance
    assert difference(module, whole) <= tolerance
    assert (spec.elementwise, spec.separate) == (not one.whole, not one.single)


class Counting(torch.optim.SGD):
    """Counts its steps where its class says."""

    def count(self, group) -> int:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            steps = self.count(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / steps)


class InGroups(Counting):
    def count(self, group) -> int:
        group["k"] = group.get("k", 0) + 1
        return group["k"]


class InTensors(InGroups):
    """In place."""

    def __init__(self, params, lr) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("k", torch.zeros(()))

    def count(self, group) -> int:
        group["k"] += 1
        return int(group["k"])


class InItself(Counting):
    steps = 0

    def count(self, group) -> int:
        self.steps += 1
        return self.steps


class Seldom(InItself):
    """Looks ahead now and then."""

    def count(self, group) -> int:
        return 1 + super().count(group) // 5


class InState(Counting):
    def count(self, group) -> int:
        counts = [self.state[p] for p in group["params"]]
        for state in counts:
            state["k"] = state.get("k", 0) + 1
        return counts[0]["k"]


@pytest.mark.parametrize("make", [InItself, Seldom])
def test_an_optimizer_that_remembers_elsewhere_is_refused(make: Any) -> None:
    module = nn.Linear(3, 2)
    assert message_of(ModelError, spec_of, module, make, list(module.parameters())) == (
        f"optimizer {make.__name__} keeps values from step to step outside its state, but the next "
        "step may run on another executor, which gets only the state. Keep them in "
        "self.state[parameter], as torch.optim does, or as numbers in param_groups."
    )


class NoisyByNumpy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(np.random.standard_normal() * random.random())


@pytest.mark.parametrize("make", [InState, InGroups, Noisy, NoisyByNumpy])
def test_one_that_keeps_its_state_or_draws_at_random_is_not(make: Any) -> None:
    module, drawn = nn.Linear(3, 2), torch.get_rng_state()
    spec_of(module, make, list(module.parameters()))
    assert torch.equal(torch.get_rng_state(), drawn) or make is not InState


@pytest.mark.parametrize("net", [OddSizes, Embedded])
def test_cuts_go_through_parameters(net: Callable[[], nn.Module]) -> None:
    """Else the tests above would not test what they say."""
    flat = FlatModule(net())
    for slices in (3, 7):
        fragments = [p for plan in slice_specs(flat.layout, slices) for p in plan.parameters]
        numbers = [fragment.number for fragment in fragments]
        assert len(numbers) > len(set(numbers))


SCHEDULED: list[tuple[str, Any]] = [
    ("SGD, momentum", partial(lr_scheduler.ExponentialLR, gamma=0.5)),
    ("SGD, Nesterov", partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=STEPS + 1)),
    ("AdamW", partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=STEPS + 1)),
    ("groups of AdamW", partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS)),
    ("SGD and Adam by name", partial(lr_scheduler.ExponentialLR, gamma=0.5)),
    ("LAMB", partial(lr_scheduler.LinearLR, total_iters=5)),
]


@pytest.mark.parametrize(("row", "schedule"), SCHEDULED)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_replaces_hyperparameters(row: str, schedule: Any) -> None:
    """Learning rates, and the momentum or betas that OneCycleLR turns as well."""
    module, make = make_net(row), ROWS[row].make
    whole, constant = copy.deepcopy(module), copy.deepcopy(module)
    on_the_whole(whole, make, schedule)
    on_the_whole(constant, make)
    assert difference(whole, constant) > 1e-3
    trainable = [p for p in module.parameters() if p.requires_grad]
    mirrored = Schedule(spec_of(module, make, trainable), schedule)

    def hyperparameters(step: int) -> Any:
        if step:
            mirrored.after(TrainState(iteration=step - 1), TrainState(iteration=step))
        return mirrored.changes()

    on_slices(module, make, 3, hyperparameters)
    assert difference(module, whole) <= 1e-12
