"""torch's optimizers on slices: the same weights as the whole module gets.

A new optimizer earns all of these tests by a row in ``ROWS``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import ModelError
from sparkdl.replica.flat import FlatModule
from sparkdl.replica.recipe import Recipe
from sparkdl.sync.optimizer import OptimizerPlan
from sparkdl.sync.plan import slice_plans
from sparkdl.sync.update import SliceState, step_slice
from sparkdl.train.schedule import Schedule

STEPS = 5
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
Optimizer = Callable[..., torch.optim.Optimizer]
Hyperparameters = Sequence[Mapping[str, Any]] | None


def by_role(kind: type[torch.optim.Optimizer], **weights: Any) -> Optimizer:
    """A function of the module that forms two groups: ``weights`` for weights, biases without."""

    def make(module: nn.Module) -> torch.optim.Optimizer:
        named = dict(module.named_parameters())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        others = [p for name, p in named.items() if not name.endswith("bias")]
        return kind([{"params": biases, "lr": 0.01}, {"params": others, **weights}], lr=0.1)

    return make


ROWS: dict[str, Optimizer] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD, default lr": torch.optim.SGD,
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD, Nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, weight decay, maximize": partial(
        torch.optim.SGD, lr=0.1, weight_decay=0.1, maximize=True
    ),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "Adam, AMSGrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam, foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "Adam, fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW, partial of a partial": partial(
        partial(torch.optim.AdamW, lr=0.5, betas=(0.8, 0.9)), lr=0.01
    ),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "RMSprop, centered, momentum": partial(
        torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9
    ),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.1, t0=2),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "groups of SGD, one with momentum": by_role(torch.optim.SGD, momentum=0.9),
    "groups of AdamW": by_role(torch.optim.AdamW, weight_decay=0.5, betas=(0.5, 0.9)),
    "groups of Adam, one AMSGrad": by_role(torch.optim.Adam, amsgrad=True),
}


class Net(nn.Module):
    """Odd sizes, a scalar, a frozen parameter, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 30, bias=False)


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


NUMBER_OF_PARAMETERS = len([p for p in Net().parameters() if p.requires_grad])
SOMETIMES, NEVER = 1, 3


def absent_in(step: int) -> frozenset[int]:
    """The parameters without a gradient: one now and then (at first, too), another always."""
    return frozenset({NEVER, SOMETIMES} if step in (0, 3) else {NEVER})


def gradients(parameters: Sequence[nn.Parameter], step: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    return [None if i in absent_in(step) else gradient for i, gradient in enumerate(drawn)]


def on_the_whole(
    module: nn.Module, make: Optimizer, schedule: Callable[..., Any] | None = None
) -> None:
    """Plain torch, as its documentation has it."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    takes_parameters = isinstance(make, (type, partial))
    optimizer = make(trainable) if takes_parameters else make(module)
    scheduler = schedule(optimizer) if schedule else None
    for step in range(STEPS):
        for parameter, gradient in zip(trainable, gradients(trainable, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def plan_of(module: nn.Module, make: Optimizer) -> OptimizerPlan:
    trainable = [p for p in module.parameters() if p.requires_grad]
    return OptimizerPlan.of(Recipe(module, torch.square, make, 0), trainable, module)


def on_slices(
    module: nn.Module,
    make: Optimizer,
    slices: int,
    hyperparameters: Callable[[int], Hyperparameters] = lambda step: None,
) -> list[SliceState]:
    """The same steps, slice by slice; the weights are brought back into ``module``."""
    flat = FlatModule(module)
    optimizer = plan_of(module, make)
    plans = slice_plans(flat.layout, slices)
    states = [SliceState(flat.flat[plan.start : plan.stop].clone()) for plan in plans]
    for step in range(STEPS):
        whole = torch.full_like(flat.flat, float("nan"))  # what is absent must not be looked at
        found = gradients([p for _, p in flat.parameters], step)
        for (segment, _), gradient in zip(flat.parameters, found, strict=True):
            if gradient is not None:
                whole[segment.start : segment.stop] = gradient.reshape(-1)
        values = hyperparameters(step)
        for plan, state in zip(plans, states, strict=True):
            gradient = whole[plan.start : plan.start + plan.trainable_length]
            step_slice(plan, state, gradient, absent_in(step), optimizer, values)
    flat.flat.copy_(torch.cat([state.weights for state in states]))
    return states


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest relative difference of a parameter or a buffer."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("slices", [1, 3, 7])
@pytest.mark.parametrize("row", ROWS)
def test_slices_get_the_weights_of_the_whole(row: str, slices: int, dtype: torch.dtype) -> None:
    module = make_net(dtype)
    whole = copy.deepcopy(module)
    on_the_whole(whole, ROWS[row])
    assert difference(module, whole) > 1e-4  # it did train
    on_slices(module, ROWS[row], slices)
    assert difference(module, whole) <= TOLERANCE[dtype]


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_found_to_be_elementwise(row: str) -> None:
    plan_of(make_net(), ROWS[row]).check_elementwise()


def test_cuts_go_through_parameters() -> None:
    """Else the tests above would not test what they say."""
    flat = FlatModule(make_net())
    for slices in (3, 7):
        pieces = [p for plan in slice_plans(flat.layout, slices) for p in plan.pieces]
        numbers = [piece.number for piece in pieces if piece.kind == "parameter"]
        assert len(numbers) > len(set(numbers))


def test_state_is_as_long_as_what_is_trained() -> None:
    module = make_net()
    layout = FlatModule(copy.deepcopy(module)).layout
    plans = slice_plans(layout, 3)
    states = on_slices(module, ROWS["Adam"], 3)
    for plan, state in zip(plans, states, strict=True):
        lengths = {name: len(array) for name, array in state.arrays.items()}
        assert lengths == dict.fromkeys(("exp_avg", "exp_avg_sq"), plan.trainable_length)
        stepped = {p.number for p in plan.pieces if p.kind == "parameter"} - {NEVER}
        assert state.scalars.keys() == stepped
        for number, scalars in state.scalars.items():
            assert scalars == {"step": STEPS - 2 if number == SOMETIMES else STEPS}


# Schedules


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (ROWS["SGD, momentum"], partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)),
        (
            ROWS["SGD, Nesterov"],
            partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=STEPS + 1),
        ),
        (
            ROWS["AdamW"],
            partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=STEPS + 1),
        ),
        (
            ROWS["groups of AdamW"],
            partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=STEPS),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_replaces_hyperparameters(
    make: Optimizer, schedule: Callable[..., Any], slices: int
) -> None:
    """Learning rates, and the momentum or betas that OneCycleLR turns as well."""
    module = make_net(torch.float64)
    whole, constant = copy.deepcopy(module), copy.deepcopy(module)
    on_the_whole(whole, make, schedule)
    on_the_whole(constant, make)
    assert difference(whole, constant) > 1e-3
    mirrored = Schedule(plan_of(module, make), schedule)

    def hyperparameters(step: int) -> Hyperparameters:
        if step:
            mirrored.step()
        return mirrored.changes()

    on_slices(module, make, slices, hyperparameters)
    assert difference(module, whole) <= 1e-12


# Refusals

SLICES_FAIL = (
    "optimizer {name} does not work on slices of a parameter ({error}). Use one that treats each "
    "element by itself: SGD, Adam, AdamW, RMSprop, Adagrad, ..."
)
WHOLE_TENSORS = (
    "optimizer {name} needs whole tensors: cutting a parameter changes its update. Use one that "
    "treats each element by itself: SGD, Adam, AdamW, RMSprop, ..."
)


def refusal(make: Optimizer, module: nn.Module) -> str:
    plan = plan_of(module, make)
    with pytest.raises(ModelError) as caught:
        plan.check_elementwise()
    return str(caught.value)


def test_lbfgs_is_refused() -> None:
    error = "LBFGS.step() missing 1 required positional argument: 'closure'"
    expected = SLICES_FAIL.format(name="LBFGS", error=error)
    assert refusal(torch.optim.LBFGS, make_net()) == expected


def test_sparse_adam_is_refused() -> None:
    error = "SparseAdam does not support dense gradients, please consider Adam instead"
    expected = SLICES_FAIL.format(name="SparseAdam", error=error)
    assert refusal(torch.optim.SparseAdam, make_net()) == expected


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_refused() -> None:
    error = (
        "Muon only supports 2D parameters whereas we found a parameter with size: torch.Size([10])"
    )
    expected = SLICES_FAIL.format(name="Muon", error=error)
    assert refusal(torch.optim.Muon, nn.Linear(4, 3, bias=False)) == expected


@pytest.mark.parametrize("lr", [1e-2, 1e-5, 1e-12])
@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="this torch has no Adafactor")
def test_adafactor_is_refused_at_any_learning_rate(lr: float) -> None:
    expected = WHOLE_TENSORS.format(name="Adafactor")
    assert refusal(partial(torch.optim.Adafactor, lr=lr), make_net()) == expected


class Normalized(torch.optim.Optimizer):
    """Divides by the norm of the whole gradient, as LARS and LAMB do in their way."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


def test_an_optimizer_of_ones_own_that_wants_whole_tensors_is_refused() -> None:
    assert refusal(Normalized, make_net()) == WHOLE_TENSORS.format(name="Normalized")
    assert refusal(lambda module: Normalized(module.parameters()), make_net()).startswith(
        "optimizer Normalized needs whole tensors"
    )


def taken_apart_badly(make: Optimizer) -> str:
    with pytest.raises(ModelError) as caught:
        plan_of(make_net(), make)
    return str(caught.value)


def test_what_is_no_optimizer_is_refused() -> None:
    assert taken_apart_badly(lambda module: module) == (
        "optimizer gave a Net: give a torch.optim class, a partial of one, or a callable(module) "
        "that returns a torch.optim.Optimizer."
    )


def test_parameters_of_another_module_are_refused() -> None:
    other = nn.Linear(2, 9)
    assert taken_apart_badly(lambda module: torch.optim.SGD(other.parameters(), lr=0.1)) == (
        "the optimizer holds a parameter of shape [9, 2] that is not one of the module's: build it "
        "from the module it is given."
    )


# Taking apart


def test_groups_and_members() -> None:
    plan = plan_of(make_net(), ROWS["groups of AdamW"])
    assert plan.name == "AdamW"
    # scale, first.weight, first.bias, norm.weight, norm.bias, last.weight
    assert plan.members == ((2, 4), (0, 1, 3, 5))
    assert [group["lr"] for group in plan.groups] == [0.01, 0.1]
    assert [group["weight_decay"] for group in plan.groups] == [0.01, 0.5]
    assert not any({"params", "param_names"} & group.keys() for group in plan.groups)


def test_frozen_parameters_may_be_in_a_group() -> None:
    plan = plan_of(make_net(), lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    assert plan.members == (tuple(range(NUMBER_OF_PARAMETERS)),)


def test_a_parameter_in_no_group_keeps_its_weights() -> None:
    module = make_net()
    before = copy.deepcopy(module.state_dict())
    on_slices(module, lambda m: torch.optim.SGD([m.scale], lr=0.1), 3)
    changed = {name for name, value in module.state_dict().items() if (value != before[name]).any()}
    assert changed == {"scale"}


def test_the_mirror_has_the_groups_and_little_else() -> None:
    mirror = plan_of(make_net(), ROWS["groups of AdamW"]).mirror()
    assert isinstance(mirror, torch.optim.AdamW)
    assert [group["lr"] for group in mirror.param_groups] == [0.01, 0.1]
    assert [[p.numel() for p in group["params"]] for group in mirror.param_groups] == [[1], [1]]


def test_a_slice_of_buffers_only_is_left_alone() -> None:
    flat = FlatModule(nn.BatchNorm1d(200))
    plan = slice_plans(flat.layout, 4)[-1]
    assert plan.trainable_length == 0
    state = SliceState(flat.flat[plan.start : plan.stop].clone())
    before = state.weights.clone()
    step_slice(plan, state, torch.empty(0), frozenset(), plan_of(flat.module, ROWS["Adam"]))
    assert torch.equal(state.weights, before)
    assert (state.arrays, state.scalars) == ({}, {})
