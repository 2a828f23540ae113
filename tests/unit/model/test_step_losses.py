"""A step of the user: what it may return, and the gradient and named losses that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import message_of
from torch import nn

from sparkdl import History, PerReplica, Trainer, TrainState
from sparkdl.errors import ModelError, ParameterError
from sparkdl.loop.advance import summarize
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.loss import ReturnedLosses, StepLoss
from sparkdl.model.recipe import LiveReplica, Recipe, Signature
from sparkdl.replica.compute import MiniBatch, forward_backward
from sparkdl.replica.iteration import Clock, ReplicaReport

X = torch.arange(12.0).reshape(6, 2) / 6
Y = torch.tensor([0.0, 1, 0, 1, 1, 0])


def run(function: Any) -> ReturnedLosses:
    return StepLoss(function, ("x",), ("y",)).returned(nn.Linear(2, 1), torch.sin, [X], [Y])


def two(module: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A squared error, a multiple of it, and counts that are no rows."""
    found = module(batch["x"]).squeeze(1)
    large = batch["x"][:, 0] > 0.5
    error = ((found - batch["y"]) ** 2).mean()
    sums = {"large": (found[large].sum(), large.sum()), "array": (error, large.numpy())}
    return {"loss": error, "doubled": 2 * error, **sums}


def test_the_batch_has_names() -> None:
    seen: list[Any] = []

    def step(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(batch)
        return module(batch["x"]).mean()

    found = run(step)
    assert list(seen[0]) == ["x", "y"]
    assert torch.equal(seen[0]["y"], Y)
    assert not found.losses
    assert torch.equal(found.output(), torch.sin(X))


@pytest.mark.parametrize(
    ("returned", "loss", "losses"),
    [
        (torch.tensor(2.0), 2.0, {}),
        ((torch.tensor(6.0), 3), (6.0, 3.0), {}),
        ({"loss": torch.tensor(2.0)}, 2.0, {}),
        ({"a": torch.tensor(2.0), "b": torch.tensor([1.0])}, 3.0, {"a": 2.0, "b": 1.0}),
        (
            {"loss": torch.tensor(2.0), "b": (torch.tensor(6.0), torch.tensor(4))},
            2.0,
            {"b": (6.0, 4.0)},
        ),
        (
            {"a": (torch.tensor(6.0), 3), "b": (torch.tensor(1.0), 3)},
            (7.0, 3.0),
            {"a": (6.0, 3.0), "b": (1.0, 3.0)},
        ),
    ],
)
def test_forms_of_the_loss(returned: Any, loss: Any, losses: dict[str, Any]) -> None:
    def plain(value: Any) -> Any:
        return tuple(map(float, value)) if isinstance(value, tuple) else float(value)

    found = run(lambda module, batch: returned)
    assert plain(found.loss) == loss
    assert {name: plain(value) for name, value in found.losses.items()} == losses


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "step returned None: it returns one number"),
        (X, r"step returned a tensor of shape \[6, 2\]"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "examples/two_optimizers.py"),
        ({"a": 1.0}, 'step returned for "a" a float'),
        ({}, "empty mapping"),
        (
            {"a": torch.tensor(1.0), "b": (torch.tensor(1.0), 3)},
            r"over different numbers of things \(a, b\)",
        ),
    ],
)
def test_what_is_no_loss(returned: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        run(lambda module, batch: returned)


@pytest.mark.parametrize("parts", [1, 3])
def test_gradient_and_named_losses_of_micro_batches(parts: int) -> None:
    step = StepLoss(two, ("x",), ("y",))
    recipe = Recipe(
        partial(nn.Linear, 2, 1), step, torch.optim.SGD, 0, TrainingOptions(accumulate=parts)
    )
    live = LiveReplica.of(recipe)
    passed = forward_backward(live, MiniBatch([X], [Y]), 0, 1.0, Clock())
    expected = LiveReplica.of(recipe).flat.module
    told = two(expected, {"x": X, "y": Y})
    told["loss"].backward()
    assert passed.loss == pytest.approx(told["loss"].item())
    assert torch.allclose(live.flat.module.weight.grad, expected.weight.grad)
    total, count = passed.losses["doubled"]
    assert (total / count, count) == (pytest.approx(2 * told["loss"].item()), 6)
    assert passed.losses["large"] == (pytest.approx(told["large"][0].item()), 4)
    assert passed.losses["array"][1] == 4
    reports = [
        ReplicaReport(0, 6, 6.0, passed.loss, "", losses=passed.losses),
        ReplicaReport(1, 2, 2.0, 0.0, "", losses={"large": (1.0, 4.0), "none": (0.0, 0.0)}),
    ]
    result = summarize(reports, [], live.flat.layout, {})
    assert result.losses == {
        "doubled": pytest.approx(2 * told["loss"].item()),
        "large": pytest.approx((told["large"][0].item() + 1) / 8),
        "array": pytest.approx(passed.losses["array"][0] / 4),
    }


def test_named_losses_are_in_every_form_of_the_history(tmp_path: Path) -> None:
    history = History()
    history.append(TrainState(iteration=1, samples=1, loss=1.0), 1)
    first = history.branch()
    for i in (2, 3):
        losses = {"a": 0.5 * i} if i == 2 else {"a": 1.5, "b": float("nan")}
        history.append(TrainState(iteration=i, samples=i, loss=1.0, losses=losses), 1)
    first.append(TrainState(iteration=2, samples=2, loss=1.0, losses={"c": 1.0}), 1)
    assert first.named_losses == {"c": [pytest.approx(float("nan"), nan_ok=True), 1.0]}
    files = [tmp_path / f"history{suffix}" for suffix in (".json", ".csv")]
    for file in files:
        history.save(file)
    read = [History.from_bytes(history.to_bytes()), *map(History.load, files)]
    for one in (history, *read, history.tail(3)):
        assert one.named_losses["a"][1:] == [1.0, 1.5]
        assert one.last(1)[0]["losses"]["a"] == 1.5
    assert history.tail(1).named_losses["a"] == [1.5]


def trainer(**given: Any) -> Trainer:
    base = {"model": partial(nn.Linear, 2, 1), "optimizer": torch.optim.SGD, "features": "x"}
    return Trainer(**{**base, "label": "y", "engine": "local", **given})


def test_the_step_as_a_loss() -> None:
    assert trainer(step=two).objective == StepLoss(two, ("x",), ("y",))
    keyed = trainer(step=PerReplica(two), features={"input": "x"}, label=None)
    assert keyed.objective == PerReplica(StepLoss(two, ("input",), ()))
    assert keyed.signature == Signature(("input",))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "neither loss= nor step= is given: give loss="),
        ({"step": two, "loss": nn.MSELoss()}, "loss= and step=: give loss="),
        ({"step": "two"}, "step is a str: give a function of (module, batch)"),
        ({"step": two, "weight": "w"}, "step= with weight: a step weighs its rows itself."),
        ({"step": two, "class_weights": [1, 2]}, "step= with class_weights: a step weighs"),
        (
            {"step": two, "engine": "gang", "strategy": "pipeline", "replicas": 2},
            'step= with strategy="pipeline": no rank has the whole model',
        ),
        ({"step": two, "features": {"y": "x"}}, "two tensors have the name y"),
    ],
)
def test_fields_that_do_not_go_together(given: dict[str, Any], text: str) -> None:
    assert text in message_of(ParameterError, trainer, **given)
