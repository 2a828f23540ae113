"""Optimizer state that goes from one fit to the next belongs to a model, an optimizer and weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.checkpoint.manifest import ModelIdentity
from sparkdl.errors import ParameterError
from sparkdl.infer.saved import StoredState
from sparkdl.model.flat import layout_of
from sparkdl.model.preparation import freeze
from sparkdl.model.recipe import weights_digest
from sparkdl.train.request import chosen_state


def make_model(width: int = 4, frozen: tuple[str, ...] = ()) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    freeze(module, frozen, ())
    return module


def identity(**changes: Any) -> ModelIdentity:
    return ModelIdentity.of(layout_of(make_model(**changes)))


@pytest.fixture
def start() -> SimpleNamespace:
    """As much of a TrainedModel as matters here."""
    module = make_model()
    kept = StoredState((b"",), identity(), ("Adam",), weights_digest(module))
    return SimpleNamespace(module=module, optimizer_state=kept)


def test_tensors_in_another_order_are_told_of_start() -> None:
    modules = [
        nn.ModuleDict({n: nn.Linear(1, 1, bias=False) for n in names}) for names in ("ab", "ba")
    ]
    here, there = (ModelIdentity.of(layout_of(module)) for module in modules)
    with pytest.raises(
        ParameterError, match=r'and parameter "b\.weight" in start: the order differs'
    ):
        StoredState((), there, (), "").check(here, ())


def test_fits_where_nothing_differs(start: SimpleNamespace) -> None:
    kept = chosen_state(start, None)
    assert kept is start.optimizer_state
    kept.check(identity(), ("Adam",))
    assert chosen_state(start, False) is None


@pytest.mark.parametrize(
    ("changes", "optimizers", "message"),
    [
        ({"frozen": ("0",)}, ("Adam",), '"0.weight" of start is not in this model'),
        ({"width": 5}, ("Adam",), r'"0.weight" is \[5, 2\] here and \[4, 2\] in start'),
        ({}, ("SGD",), "the optimizer is SGD here and Adam in start"),
        ({}, ("Adam", "SGD"), "the optimizer is Adam, SGD here"),
    ],
    ids=["frozen", "wider", "optimizer", "two optimizers"],
)
def test_refused_where_it_would_be_of_something_else(
    start: SimpleNamespace, changes: dict[str, Any], optimizers: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        start.optimizer_state.check(identity(**changes), optimizers)
    assert "optimizer_state=False" in str(caught.value)


def test_refused_where_the_module_was_changed(start: SimpleNamespace) -> None:
    with torch.no_grad():
        start.module[0].bias[0] += 1
    with pytest.raises(ParameterError, match="changed after its training"):
        chosen_state(start, None)
    assert chosen_state(start, False) is None
