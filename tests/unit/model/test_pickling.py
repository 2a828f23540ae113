"""Modules with parametrizations are pickled, and modules that cannot be are built again."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from pyspark import cloudpickle
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from sparkdl.model.preparation import Rebuilt, dumps
from sparkdl.process.determinism import seeded

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


def own(module: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(module, "weight", Symmetric())


MAKE = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Conv1d(2, 4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3, bias=False)),
    "two of a kind": lambda: parametrizations.spectral_norm(own(nn.Linear(3, 3))),
    "two tensors": lambda: parametrizations.weight_norm(
        parametrizations.weight_norm(nn.Linear(3, 3)), "bias", None
    ),
}


def weights(module: nn.Module) -> torch.Tensor:
    return module.eval().weight.detach()  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("name", MAKE)
def test_a_parametrized_module_comes_back(name: str) -> None:
    part = MAKE[name]()
    module = nn.Sequential(nn.Linear(3, 3), part)
    for again in (pickle.loads(dumps(module)), pickle.loads(dumps(pickle.loads(dumps(module))))):
        left, right = module.state_dict(), again.state_dict()
        assert list(left) == list(right)
        assert all(torch.equal(left[key], right[key]) for key in left)
        assert [n for n, _ in module.named_parameters()] == [n for n, _ in again.named_parameters()]
        assert torch.equal(weights(part), weights(again[1]))
        assert torch.equal(weights(copy.deepcopy(again)[1]), weights(part))
        again[1].train()
        again[1].weight.sum().backward()
        assert any(p.grad is not None for p in again[1].parametrizations.parameters())
        parametrize.remove_parametrizations(again[1], "weight")
        assert "1.weight" in again.state_dict()


def test_one_that_is_in_two_places_stays_one() -> None:
    part = parametrizations.weight_norm(nn.Linear(3, 3))
    again = pickle.loads(dumps({"module": nn.Sequential(part, part), "part": part}))
    assert again["module"][0] is again["module"][1] is again["part"]


class Locked(nn.Module):
    """Cannot be pickled; a tensor is tied, and one is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.other.weight = self.one.weight
        self.register_buffer("shift", torch.rand(2), persistent=False)
        self.plain = torch.rand(2)
        self.lock = threading.Lock()


@pytest.mark.parametrize("make", [Locked, lambda: torch.compile(Locked(), backend="eager")])
def test_what_cannot_be_pickled_is_built_again(make: Callable[[], nn.Module]) -> None:
    with seeded(3):
        module = Locked()
    with pytest.raises(TypeError, match="lock"):
        dumps(module)
    state = random.getstate()
    again = pickle.loads(dumps(Rebuilt.of(module, make, 3)))
    assert type(again).__name__ == "Locked"
    assert again.one.weight is again.other.weight
    for name in ("one.weight", "other.bias"):
        assert torch.equal(again.state_dict()[name], module.state_dict()[name])
    assert torch.equal(again.shift, module.shift)
    assert torch.equal(again.plain, module.plain)  # drawn again
    assert random.getstate() == state
