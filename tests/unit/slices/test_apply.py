"""A step on a slice: what state it keeps for whom, and that versions in slabs keep it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import sparkdl
from sparkdl.engines.shuffle.store import first_version, next_version
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import FlatModule
from sparkdl.model.recipe import Recipe
from sparkdl.slab.pool import Pool
from sparkdl.slab.root import SlabConfig, open_root
from sparkdl.slices.optimizer import OptimizerSpec, take_step
from sparkdl.slices.optimizer_step import _where_stepped, step_slice
from sparkdl.slices.spec import Fragment, SliceSpec, SliceState, pack, slice_specs, unpack


class Net(nn.Module):
    """Parameters by number: 0 scale, 1 and 2 first, 3 last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(7, 30, bias=False)


def parts_of(
    module: nn.Module, make: Any, options: TrainingOptions | None = None
) -> tuple[FlatModule, OptimizerSpec, list[SliceSpec]]:
    """The module, its optimizer, and the only slice."""
    flat = FlatModule(module)
    recipe = Recipe(module, torch.square, make, 0, options or TrainingOptions())
    optimizer = OptimizerSpec.of(recipe, [p for _, p in flat.parameters], module)
    return flat, optimizer, slice_specs(flat.layout, 1)


def states_of(flat: FlatModule, plans: list[SliceSpec]) -> list[SliceState]:
    return [SliceState(flat.flat[plan.start : plan.stop].clone()) for plan in plans]


def gradient_of(plan: SliceSpec, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(plan.dense_length, generator=generator)


def test_what_a_step_may_not_touch() -> None:
    """Parameters of no optimizer, buffers, and the caller's gradient."""

    def make(module: Any) -> optim.Optimizer:
        return optim.AdamW([module[0].weight], lr=0.1)

    module = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9))
    flat, optimizer, (plan,) = parts_of(module, make)
    (state,) = states_of(flat, [plan])
    before, gradient = copy.deepcopy(state.weights), gradient_of(plan)
    kept = gradient.clone()
    step_slice(plan, state, gradient, frozenset(), optimizer)
    changed = (state.weights != before).nonzero().flatten().tolist()
    assert changed == list(range(81))
    assert torch.equal(gradient, kept)


class Replacing(optim.Optimizer):
    """Gives its parameters new memory, as some optimizers from elsewhere do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def test_an_optimizer_that_replaces_memory() -> None:
    flat, optimizer, (plan,) = parts_of(Net(), Replacing)
    _, plain, _ = parts_of(Net(), partial(optim.SGD, lr=0.1))
    one, other = states_of(flat, [plan, plan])
    step_slice(plan, one, gradient_of(plan), frozenset(), optimizer)
    step_slice(plan, other, gradient_of(plan), frozenset(), plain)
    torch.testing.assert_close(one.weights, other.weights)
    assert not torch.equal(one.weights, flat.flat)


class Recording(optim.SGD):
    """Wants the loss, and keeps what it was and the kinds of gradients that it saw."""

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        self.state[parameter] = {"loss": float(closure()), "shape": tuple(parameter.shape)}


@pytest.mark.parametrize("shape", [(2, 3), (6,), ()])
def test_an_optimizer_that_wants_the_loss_gets_it_and_pieces_have_their_shape(
    shape: tuple[int, ...],
) -> None:
    length = 6 if shape else 1
    plan = SliceSpec(0, 0, length, (Fragment(0, "parameter", 0, length, shape),))
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    _, plain, _ = parts_of(module, partial(optim.SGD, lr=0.1))
    part = replace(plain, parts=tuple(replace(part, make=Recording) for part in plain.parts))
    state = SliceState(torch.zeros(length))
    step_slice(plan, state, torch.ones(length), frozenset(), part, loss=torch.tensor(2.5))
    assert state.others[0] == {"loss": 2.5, "shape": shape or (1,)}
    step_slice(plan, state, torch.ones(length), frozenset(), part)
    assert state.others[0]["loss"] != state.others[0]["loss"]  # not given: NaN


# Versions in slabs


@pytest.fixture
def pool(slab: SlabConfig) -> Iterator[Pool]:
    open_root(slab, create=True)
    pool = Pool(slab)
    yield pool
    pool.close()


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, whatever it is nested in."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(
    "make",
    [
        optim.SGD,
        optim.Adam,
        partial(optim.Adagrad, lr=0.1),
        partial(optim.LBFGS, max_iter=1, history_size=2),
        optim.Adafactor,
        {"first": partial(optim.SGD, lr=0.1, momentum=0.9), "": optim.Adam},
    ],
)
def test_versions_in_slabs_go_the_way_of_one_state_in_memory(pool: Pool, make: Any) -> None:
    flat, optimizer, (plan,) = parts_of(Net(), make)
    (state,) = states_of(flat, [plan])
    handle = first_version(pool, state, submission=0)
    for submission in range(1, 6):
        absent = frozenset({1} if submission == 1 else set())
        gradient = gradient_of(plan, submission)
        loss = torch.tensor(1 / submission)
        step_slice(plan, state, gradient, absent, optimizer, loss=loss)
        with next_version(pool, handle, torch.float32, submission, submission - 1) as (
            old,
            copied,
            new,
        ):
            copied.weights.copy_(old.weights)
            for name, array in old.arrays.items():
                copied.arrays[name].copy_(array)
            step_slice(plan, copied, gradient, absent, optimizer, loss=loss)
            handle = new.seal(copied)
    with next_version(pool, handle, torch.float32, 6, 5) as (last, _, _):
        assert torch.equal(last.weights, state.weights)
        assert last.held == state.held
        assert last.arrays.keys() == state.arrays.keys()
        assert all(torch.equal(last.arrays[name], state.arrays[name]) for name in state.arrays)
        assert same(last.others, state.others)


def test_others_may_be_anything_with_tensors_in_it() -> None:
    others = {
        3: {
            "step": torch.tensor(2.0),
            "lists": [torch.arange(3), (torch.ones(2, 2).double(), 0.5)],
            "low": torch.ones(2, dtype=torch.bfloat16),
            "flag": torch.tensor([True]),
            "sparse": torch.eye(2).to_sparse(),
            "text": "abc",
        }
    }
    held, found = unpack(pack(SliceState(torch.empty(0), {}, {3: ("a",)}, others)))
    assert held == {3: ("a",)}
    found, wanted = found[3], others[3]
    assert torch.equal(found.pop("sparse").to_dense(), wanted.pop("sparse").to_dense())
    assert found.pop("text") == wanted.pop("text")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)  # dtypes too
    found["lists"][0].add_(1)  # its own memory, and writable


@pytest.mark.parametrize(
    ("kind", "other", "missing"),
    [
        (optim.Adam, {"amsgrad": True}, "max_exp_avg_sq"),
        (optim.RMSprop, {"centered": True}, "grad_avg"),
        (optim.RMSprop, {"momentum": 0.9}, "momentum_buffer"),
        (optim.SGD, {"momentum": 0.9}, None),  # it makes that when it needs it
    ],
)
def test_state_of_other_hyperparameters(kind: Any, other: dict[str, Any], missing: Any) -> None:
    flat, before, (plan,) = parts_of(Net(), kind)
    _, after, _ = parts_of(Net(), partial(kind, **other))
    (state,) = states_of(flat, [plan])
    step_slice(plan, state, gradient_of(plan), frozenset(), before)
    weights = state.weights.clone()
    if missing is None:
        step_slice(plan, state, gradient_of(plan, 1), frozenset(), after)
        return
    with pytest.raises(sparkdl.ModelError) as caught:
        step_slice(plan, state, gradient_of(plan, 1), frozenset(), after)
    assert str(caught.value) == (
        f'optimizer {kind.__name__} misses "{missing}" in its state, which was made with other '
        "hyperparameters: train with those of the run that this one continues, or take its weights "
        "alone, with fit(data, start=model, optimizer_state=False)."
    )
    assert torch.equal(state.weights, weights)


@pytest.mark.parametrize("kind", [optim.Adam, optim.RMSprop, partial(optim.SGD, momentum=0.9)])
def test_state_is_where_the_weights_are(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "meta" stands for a GPU: an operation over both devices raises there, too."""
    copy_to = torch.Tensor.copy_

    def copied(self: torch.Tensor, other: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        if other.is_meta and not self.is_meta:  # as from a GPU to the CPU, which is legal
            return self
        return copy_to(self, other, *args, **how)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    _, optimizer, (plan,) = parts_of(Net(), partial(kind, lr=0.1, foreach=False))
    state = SliceState(torch.zeros(plan.length, device="meta"))
    gradient = torch.zeros(plan.dense_length, device="meta")
    for _ in range(2):
        step_slice(plan, state, gradient, frozenset(), optimizer)
    assert state.arrays
    assert all(array.is_meta for array in state.arrays.values())
    steps = [v for others in state.others.values() for n, v in others.items() if n == "step"]
    assert all(step.device.type == "cpu" for step in steps)  # torch's own way, see load_state_dict


def test_state_from_elsewhere_comes_to_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    others = {"step": torch.tensor(4.0), "factor": torch.ones(2), "pair": [torch.ones(1), 5]}
    (plain,) = optim.Adam([parameter]).param_groups
    (counting,) = optim.Adam([parameter], capturable=True).param_groups
    found = _where_stepped(plain, parameter, others)
    assert not found["step"].is_meta
    assert found["factor"].is_meta
    assert found["pair"][0].is_meta
    assert found["pair"][1] == 5
    assert _where_stepped(counting, parameter, others)["step"].is_meta


STEPS = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta),
    *(optim.NAdam, optim.RAdam, optim.Rprop, optim.ASGD, optim.Adamax),
)


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.__name__)
def test_a_step_of_torchs_is_the_same_without_its_compiler(
    kind: type[optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [torch.linspace(-1, 1, 9).requires_grad_() for _ in range(2)]
    whole, ours = (kind([each], lr=0.1) for each in weights)
    for factor in (1.0, -0.3, 2.0):
        for each in weights:
            each.grad = factor * torch.linspace(-2, 3, 9)
        whole.step()
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "torch._dynamo", None)  # importing it is an error
            take_step(kind([torch.zeros(1)], lr=0.1))
            take_step(ours)
    assert torch.equal(*weights)
    assert ours.param_groups[0]["lr"] == whole.param_groups[0]["lr"]


def test_hooks_around_a_step_are_called() -> None:
    weight, called = torch.ones(2, requires_grad=True), []
    weight.grad = torch.ones(2)
    optimizer = optim.SGD([weight], lr=0.5)
    optimizer.register_step_post_hook(lambda *_: called.append(weight.tolist()))
    take_step(optimizer)
    assert called == [[0.5, 0.5]]
