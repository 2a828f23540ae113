"""Optimizers taken apart: their groups, what they can be cut into, and what is refused.

That slices get the weights of the whole is in tests/parity/test_optimizers.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from mistakes import message_of
from torch import nn
from torch.optim import SGD

import sparkdl.optim
from sparkdl.errors import ModelError
from sparkdl.model.optimizer_factory import build_optimizers
from sparkdl.model.recipe import Recipe
from sparkdl.slices.optimizer import OptimizerSpec
from sparkdl.slices.optimizer_probe import probe_cut_rule
from sparkdl.train.recipes import plan_optimizer


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


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    named = dict(module.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    others = [p for name, p in named.items() if not name.endswith("bias")]
    groups = [{"params": biases, "lr": 0.01}, {"params": others, "weight_decay": 0.5}]
    return torch.optim.AdamW(groups, lr=0.1)


def plan_of(module: nn.Module, make: Any) -> OptimizerSpec:
    trainable = [p for p in module.parameters() if p.requires_grad]
    plan = OptimizerSpec.of(Recipe(module, torch.square, make, 0), trainable, module)
    return probe_cut_rule(plan, trainable, module)


# Refusals


def refusal(make: Any, module: nn.Module) -> str:
    with pytest.raises(ModelError) as caught:
        plan_of(module, make)
    return str(caught.value)


SEVERAL = (
    "Give parameters that need another one their own, by name or pattern: "
    'optimizer={"encoder": torch.optim.Muon, "embedding": torch.optim.SparseAdam, "": '
    "torch.optim.AdamW}."
)


@pytest.mark.parametrize("arguments", [{}, {"max_iter": 1, "line_search_fn": "strong_wolfe"}])
def test_lbfgs_with_several_evaluations_is_refused(arguments: dict[str, Any]) -> None:
    assert refusal(partial(torch.optim.LBFGS, **arguments), make_net()) == (
        "optimizer LBFGS evaluates the loss more than once in a step, but an iteration is a single "
        "pass over a batch. Make each step evaluate it once: for LBFGS, partial(torch.optim.LBFGS, "
        "max_iter=1) without line_search_fn."
    )


@pytest.mark.parametrize("groups", [{}, {"lr": torch.tensor(0.1)}], ids=["plain", "tensor lr"])
def test_steps_for_cuda_graphs_are_refused(groups: dict[str, Any]) -> None:
    adam = partial(torch.optim.Adam, capturable=True, **groups)
    assert refusal(adam, make_net()) == (
        "optimizer Adam has capturable=True, which is for steps in a CUDA graph, which sparkdl "
        "does not use: leave it out."
    )


def test_lbfgs_is_refused_on_several_slices() -> None:
    module = make_net()
    recipe = Recipe(module, torch.square, partial(torch.optim.LBFGS, max_iter=1), 0)
    assert not plan_optimizer(recipe, module, 1).separate
    assert message_of(ModelError, plan_optimizer, recipe, module, 3) == (
        "optimizer LBFGS uses all parameters together, so they must be in one slice, but there are "
        "3: set slices=1."
    )


def test_sparse_adam_is_refused_on_dense_gradients() -> None:
    assert refusal(torch.optim.SparseAdam, nn.Linear(3, 2, bias=False)) == (
        "optimizer SparseAdam fails on a parameter of 2 dimensions with a dense gradient "
        "(RuntimeError: SparseAdam does not support dense gradients, please consider Adam "
        f"instead). {SEVERAL}"
    )


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
    message = refusal(make, module)
    assert "does not take the sparse gradients of an embedding with sparse=True (" in message
    assert message.endswith(
        'Give the embedding another optimizer by its name, optimizer={"embedding": '
        'torch.optim.SparseAdam, "": torch.optim.Adam}, or build it with sparse=False.'
    )
    assert "\n" not in message


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_refused_on_vectors_with_the_remedy() -> None:
    module = make_net()
    with pytest.raises(ModelError) as caught:
        plan_optimizer(Recipe(module, torch.square, torch.optim.Muon, 0), module, 1)
    assert "Muon only supports 2D parameters" in str(caught.value)
    assert str(caught.value).endswith(SEVERAL)


@pytest.mark.parametrize("lr", [1e-2, 1e-5, 1e-12])
@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="this torch has no Adafactor")
def test_adafactor_is_known_at_any_learning_rate(lr: float) -> None:
    assert not plan_of(make_net(), partial(torch.optim.Adafactor, lr=lr)).elementwise


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


def test_an_optimizer_of_ones_own_that_wants_whole_tensors_is_known() -> None:
    for make in (Normalized, lambda module: Normalized(module.parameters())):
        plan = plan_of(make_net(), make)
        assert (plan.elementwise, plan.separate) == (False, True)


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="this torch has no Adafactor")
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("make", [sparkdl.optim.LAMB, sparkdl.optim.LARS, Normalized, "Adafactor"])
def test_a_learning_rate_that_begins_at_0_hides_nothing(make: Any, lr: Any) -> None:
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
    "above a large norm": lambda step, weights, gradient: gradient > 1e4,
    "above a very large norm": lambda step, weights, gradient: gradient > 1e7,
    "below a small norm": lambda step, weights, gradient: 0 < gradient < 1e-2,
    "at large weights": lambda step, weights, gradient: weights > 1e3,
    "after a few steps": lambda step, weights, gradient: step > 40,
}


@pytest.mark.parametrize("name", LOOKS)
def test_an_optimizer_that_looks_around_only_sometimes_is_known(name: str) -> None:
    plan = plan_of(make_net(), partial(Sometimes, where=LOOKS[name]))
    assert (plan.elementwise, plan.separate) == (False, True)


def test_one_that_never_looks_around_may_be_cut() -> None:
    assert plan_of(make_net(), partial(Sometimes, where=lambda *_: False)).elementwise


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("element", (True, True)), ("tensor", (False, True)), ("all", (False, False))],
)
def test_a_class_may_say_what_it_is(answer: str, expected: tuple[bool, bool]) -> None:
    for base in (SGD, Global):
        kind = type("Declared", (base,), {"update_depends_on": answer})
        plan = plan_of(make_net(), partial(kind, lr=0.1))
        assert (plan.elementwise, plan.separate) == expected


def test_a_class_that_says_nonsense_is_refused() -> None:
    kind = type("Declared", (SGD,), {"update_depends_on": "tensors"})
    assert refusal(kind, make_net()) == (
        "Declared.update_depends_on is 'tensors': an element's update depends on that \"element\", "
        'on its "tensor", or on "all" of them.'
    )


class Global(Normalized):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            total = torch.stack([p.grad.norm() for p in given]).norm()
            for p in given:
                p.sub_(p.grad, alpha=float(group["lr"] / total))


def test_an_optimizer_of_ones_own_that_wants_everything_is_known() -> None:
    assert not plan_of(make_net(), Global).separate


def test_every_group_is_tried() -> None:
    """The second adapts to the tensor's norm; the first does not."""

    def make(module: Net) -> torch.optim.Optimizer:
        named = [{"params": [module.scale], "adapt": False}, {"params": [module.last.weight]}]
        return sparkdl.optim.LAMB(named)

    assert not plan_of(make_net(), make).elementwise


def taken_apart_badly(make: Any) -> str:
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
        "the optimizer has a parameter of shape [9, 2] that is not one of the module's: build it "
        "from the module it is given."
    )


# Taking apart


def test_groups_and_members() -> None:
    plan = plan_of(make_net(), two_groups)
    assert plan.name == "AdamW"
    # scale, first.weight, first.bias, norm.weight, norm.bias, last.weight
    assert plan.members == ((2, 4), (0, 1, 3, 5))
    assert [group["lr"] for group in plan.groups] == [0.01, 0.1]
    assert [group["weight_decay"] for group in plan.groups] == [0.01, 0.5]
    assert not any({"params", "param_names"} & group.keys() for group in plan.groups)


def test_frozen_parameters_may_be_in_a_group() -> None:
    plan = plan_of(make_net(), lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    assert plan.members == (tuple(range(NUMBER_OF_PARAMETERS)),)


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


def names_by_optimizer(module: nn.Module, given: dict[str, Any]) -> dict[float, set[str]]:
    """The names of the parameters that the optimizer with each learning rate holds."""
    named = {id(p): name for name, p in module.named_parameters()}
    rates = {key: rate for rate, key in enumerate(given, 1)}
    factories = {key: partial(kind, lr=rates[key]) for key, kind in given.items()}
    built = build_optimizers(Recipe(module, torch.square, factories, 0), module)
    return {
        group["lr"]: {named[id(p)] for p in group["params"]}
        for _, optimizer in built
        for group in optimizer.param_groups
    }


def test_the_longest_key_wins() -> None:
    given = {"": SGD, "first": SGD, "first.bias": SGD, "*.bias": SGD, "norm.b*": SGD}
    assert names_by_optimizer(make_net(), given) == {
        1: {"scale", "norm.weight", "last.weight"},
        2: {"first.weight"},
        3: {"first.bias"},
        5: {"norm.bias"},
    }


def test_a_name_goes_before_a_pattern_of_its_length() -> None:
    module = nn.Sequential(nn.Linear(2, 1))
    assert names_by_optimizer(module, {"*": SGD, "?.bias": SGD, "0": SGD}) == {
        2: {"0.bias"},
        3: {"0.weight"},
    }


def test_a_key_is_no_prefix_of_letters() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.header = nn.Linear(2, 2), nn.Linear(2, 2)

    assert names_by_optimizer(Alike(), {"head": SGD, "": SGD})[1] == {"head.weight", "head.bias"}


def test_a_tied_parameter_is_found_by_any_of_its_names() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    assert names_by_optimizer(module, {"1": SGD, "0.bias": SGD}) == {
        1: {"0.weight", "1.bias"},
        2: {"0.bias"},
    }


def test_a_callable_is_given_the_parameters_it_wins() -> None:
    def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.ndim > 1]
        return SGD([{"params": matrices, "lr": 0.1}, {"params": parameters[-1:]}], lr=0.2)

    plan = plan_of(make_net(), {"first": grouped, "": SGD})
    assert plan.members == ((1,), (2,), (0, 3, 4, 5))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"first": SGD, "*.bias": SGD},
            "no optimizer is given for parameter \"scale\" (keys: 'first', '*.bias'): add a key "
            'for it, or "" for all the rest.',
        ),
        (
            {"lats": SGD, "": SGD},
            'optimizer: "lats" is no submodule or parameter of the model. Did you mean "last"?',
        ),
        ({"frozen": SGD, "": SGD}, 'optimizer: "frozen" holds no trainable parameter.'),
        (
            {"": 0.1},
            "optimizer[''] is 0.1: give the name of a submodule or parameter, and for it a "
            "torch.optim class or a partial of one, such as partial(Adam, lr=1e-3).",
        ),
        (
            {"": lambda parameters: None},
            "optimizer for '' gave None: give a torch.optim class, a partial of one, or a "
            "callable(module) that returns a torch.optim.Optimizer.",
        ),
    ],
)
def test_mistakes_in_names(given: dict[str, Any], message: str) -> None:
    found = refusal(given, make_net())
    assert found.startswith(message)


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    def make(module: Net) -> list[torch.optim.Optimizer]:
        return [SGD(module.parameters(), lr=0.1), torch.optim.Adam([module.scale])]

    assert refusal(make, make_net()) == (
        'two optimizers, SGD and Adam, have the parameter "scale": give it to one.'
    )
