"""Optimizers taken apart: their groups, what they can be cut into, and what is refused.

That slices get the weights of the whole is in tests/parity/test_optimizers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mistakes import message_of
from own_optimizers import OddSizes, by_role
from torch import nn
from torch.optim import SGD

import sparkdl.optim
from sparkdl.errors import ModelError
from sparkdl.model.recipe import Recipe
from sparkdl.slices.optimizer import OptimizerSpec, build_optimizers
from sparkdl.slices.optimizer_probe import SEVERAL, probe_cut_rule
from sparkdl.train.prepare import plan_optimizer

two_groups = by_role(torch.optim.AdamW, weight_decay=0.5)


def make_net(dtype: torch.dtype = torch.float32) -> OddSizes:
    torch.manual_seed(0)
    return OddSizes().to(dtype)


def plan_of(module: nn.Module, make: Any) -> OptimizerSpec:
    trainable = [p for p in module.parameters() if p.requires_grad]
    plan = OptimizerSpec.of(Recipe(module, torch.square, make, 0), trainable, module)
    return probe_cut_rule(plan, trainable, module)


# Refusals

OTHERS = nn.Linear(2, 9)
TWICE = "optimizer LBFGS evaluates the loss more than once in a step"
WRONG = "optimizer[''] is 0.1: give the name of a submodule or parameter"
REFUSED: dict[str, tuple[Any, str]] = {
    "several evaluations": (torch.optim.LBFGS, TWICE),
    "a search along the line": (partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"), TWICE),
    "for sparse gradients": (torch.optim.SparseAdam, "with a dense gradient (RuntimeError: Sparse"),
    "a class that says nonsense": (
        type("Declared", (SGD,), {"update_depends_on": "tensors"}),
        "Declared.update_depends_on is 'tensors': an element's update depends on that \"element\", "
        'on its "tensor", or on "all" of them.',
    ),
    "no optimizer": (lambda module: module, "optimizer gave an OddSizes: give a torch.optim class"),
    "parameters of another module": (
        lambda module: SGD(OTHERS.parameters(), lr=0.1),
        "the optimizer has a parameter of shape [9, 2] that is not one of the module's",
    ),
    "one parameter in two": (
        lambda module: [SGD(module.parameters(), lr=0.1), torch.optim.Adam([module.scale])],
        'two optimizers, SGD and Adam, have the parameter "scale": give it to one.',
    ),
    "not for all": (
        {"first": SGD, "*.bias": SGD},
        "no optimizer is given for parameter \"scale\" (keys: 'first', '*.bias'): add a key",
    ),
    "no such name": (
        {"lats": SGD, "": SGD},
        'optimizer: "lats" is no submodule or parameter of the model. Did you mean "last"?',
    ),
    "nothing to train": (
        {"frozen": SGD, "": SGD},
        'optimizer: "frozen" holds no trainable parameter.',
    ),
    "a number by name": ({"": 0.1}, WRONG),
    "none by name": ({"": lambda parameters: None}, "optimizer for '' gave None: give a torch"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_refused(row: str) -> None:
    make, message = REFUSED[row]
    assert message in message_of(ModelError, plan_of, make_net(), make)


def test_lbfgs_is_refused_on_several_slices() -> None:
    module = make_net()
    recipe = Recipe(module, torch.square, partial(torch.optim.LBFGS, max_iter=1), 0)
    assert not plan_optimizer(recipe, module, 1).separate
    with pytest.raises(ModelError, match="there are 3: set slices=1"):
        plan_optimizer(recipe, module, 3)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_refused_on_vectors_with_the_remedy() -> None:
    module = make_net()
    recipe = Recipe(module, torch.square, torch.optim.Muon, 0)
    message = message_of(ModelError, plan_optimizer, recipe, module, 1)
    assert "Muon only supports 2D parameters" in message
    assert message.endswith(SEVERAL)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        {"": torch.optim.AdamW},
        sparkdl.optim.LAMB,
    ],
)
def test_optimizers_that_take_no_sparse_gradients_are_refused_on_tables(make: Any) -> None:
    module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    message = message_of(ModelError, plan_of, module, make)
    assert "does not take the sparse gradients of an embedding with sparse=True (" in message
    assert message.endswith(
        'Give the embedding another optimizer by its name, optimizer={"embedding": '
        'torch.optim.SparseAdam, "": torch.optim.Adam}, or build it with sparse=False.'
    )
    assert "\n" not in message


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


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="this torch has no Adafactor")
@pytest.mark.parametrize("lr", [1e-12, 0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("make", [sparkdl.optim.LAMB, sparkdl.optim.LARS, Normalized, "Adafactor"])
def test_a_learning_rate_that_is_nearly_0_at_first_hides_nothing(make: Any, lr: Any) -> None:
    kind = torch.optim.Adafactor if make == "Adafactor" else make
    assert not plan_of(make_net(), partial(kind, lr=lr)).elementwise
    assert plan_of(make_net(), partial(SGD, lr=lr)).elementwise


class Sometimes(torch.optim.Optimizer):
    """Scales a tensor's gradient where ``where(step, weights, gradient)``."""

    def __init__(self, params: Any, where: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "where": where})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                step = self.state[p].setdefault("step", torch.tensor(0.0))
                step += 1
                looks = group["where"](float(step), float(p.norm()), float(p.grad.norm()))
                p.sub_(p.grad / p.grad.norm() if looks else p.grad, alpha=group["lr"])


LOOKS = {
    "never": lambda *_: False,
    "above a large norm": lambda step, weights, gradient: gradient > 1e4,
    "above a very large norm": lambda step, weights, gradient: gradient > 1e7,
    "below a small norm": lambda step, weights, gradient: 0 < gradient < 1e-2,
    "at large weights": lambda step, weights, gradient: weights > 1e3,
    "after a few steps": lambda step, weights, gradient: step > 40,
}


@pytest.mark.parametrize("name", LOOKS)
def test_an_optimizer_that_looks_around_only_sometimes_is_known(name: str) -> None:
    plan = plan_of(make_net(), partial(Sometimes, where=LOOKS[name]))
    assert (plan.elementwise, plan.separate) == (name == "never", True)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("element", (True, True)), ("tensor", (False, True)), ("all", (False, False))],
)
def test_a_class_may_say_what_it_is(answer: str, expected: tuple[bool, bool]) -> None:
    for base in (SGD, Global):
        kind = type("Declared", (base,), {"update_depends_on": answer})
        plan = plan_of(make_net(), partial(kind, lr=0.1))
        assert (plan.elementwise, plan.separate) == expected


class Global(Normalized):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            total = torch.stack([p.grad.norm() for p in given]).norm()
            for p in given:
                p.sub_(p.grad, alpha=float(group["lr"] / total))


def test_an_optimizer_of_ones_own_is_found_out() -> None:
    """One that wants whole tensors, or everything, or that adapts in the second group alone."""
    for make in (Normalized, lambda module: Normalized(module.parameters())):
        plan = plan_of(make_net(), make)
        assert (plan.elementwise, plan.separate) == (False, True)
    assert not plan_of(make_net(), Global).separate

    def make(module: OddSizes) -> torch.optim.Optimizer:
        named = [{"params": [module.scale], "adapt": False}, {"params": [module.last.weight]}]
        return sparkdl.optim.LAMB(named)

    assert not plan_of(make_net(), make).elementwise


# Taking apart


def test_groups_and_members() -> None:
    plan = plan_of(make_net(), two_groups)
    assert plan.name == "AdamW"
    # scale, first.weight, first.bias, norm.weight, norm.bias, last.weight
    assert plan.members == ((2, 4), (0, 1, 3, 5))
    assert [group["lr"] for group in plan.groups] == [0.01, 0.1]
    assert [group["weight_decay"] for group in plan.groups] == [0.01, 0.5]
    assert not any({"params", "param_names"} & group.keys() for group in plan.groups)
    with_frozen = plan_of(make_net(), lambda module: SGD(module.parameters(), lr=0.1))
    assert with_frozen.members == (tuple(range(6)),)


def test_mirrors_have_the_groups_and_little_else() -> None:
    (mirror,) = plan_of(make_net(), two_groups).schedule_targets()
    assert isinstance(mirror, torch.optim.AdamW)
    assert [group["lr"] for group in mirror.param_groups] == [0.01, 0.1]
    assert [[p.numel() for p in group["params"]] for group in mirror.param_groups] == [[1], [1]]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_mirrors_of_several_are_in_the_order_of_groups() -> None:
    plan = plan_of(
        make_net(), {"last": partial(torch.optim.Muon, lr=0.5), "": partial(SGD, lr=0.25)}
    )
    assert [type(mirror) for mirror in plan.schedule_targets()] == [torch.optim.Muon, SGD]
    assert [group["lr"] for group in plan.groups] == [0.5, 0.25]
    assert plan.members == ((5,), (0, 1, 2, 3, 4))


# Several by name


def alike() -> nn.Module:
    return nn.ModuleDict({"head": nn.Linear(2, 2), "header": nn.Linear(2, 2)})


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


NAMED: dict[str, tuple[Callable[[], nn.Module], dict[str, set[str]]]] = {
    "the longest key wins": (
        make_net,
        {
            "": {"scale", "norm.weight", "last.weight"},
            "first": {"first.weight"},
            "first.bias": {"first.bias"},
            "*.bias": set(),
            "norm.b*": {"norm.bias"},
        },
    ),
    "a name goes before a pattern of its length": (
        lambda: nn.Sequential(nn.Linear(2, 1)),
        {"*": set(), "?.bias": {"0.bias"}, "0": {"0.weight"}},
    ),
    "a key is no prefix of letters": (
        alike,
        {"head": {"head.weight", "head.bias"}, "": {"header.weight", "header.bias"}},
    ),
    "a tied parameter has any of its names": (
        tied,
        {"1": {"0.weight", "1.bias"}, "0.bias": {"0.bias"}},
    ),
}


@pytest.mark.parametrize("row", NAMED)
def test_which_key_a_parameter_goes_by(row: str) -> None:
    make, expected = NAMED[row]
    rates = {key: float(rate) for rate, key in enumerate(expected, 1)}
    module = make()
    named = {id(p): name for name, p in module.named_parameters()}
    factories = {key: partial(SGD, lr=rate) for key, rate in rates.items()}
    found = {
        group["lr"]: {named[id(p)] for p in group["params"]}
        for _, optimizer in build_optimizers(Recipe(module, torch.square, factories, 0), module)
        for group in optimizer.param_groups
    }
    assert found == {rates[key]: names for key, names in expected.items() if names}


def test_a_callable_is_given_the_parameters_it_wins() -> None:
    def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.ndim > 1]
        return SGD([{"params": matrices, "lr": 0.1}, {"params": parameters[-1:]}], lr=0.2)

    plan = plan_of(make_net(), {"first": grouped, "": SGD})
    assert plan.members == ((1,), (2,), (0, 3, 4, 5))
