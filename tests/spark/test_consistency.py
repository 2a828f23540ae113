"""A consistency model decides which version replicas compute on, and what it decided is repeated."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl.engines import registry
from sparkdl.engines.shuffle.consistency import Consistency, Dispatch, Synchronous
from sparkdl.engines.shuffle.engine import ShuffleEngine

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS, ITERATIONS = 16, 6


@dataclass(frozen=True)
class Bounded:
    """Replicas compute on the oldest version that is at most ``staleness`` behind."""

    staleness: int

    @property
    def keep(self) -> int:
        return self.staleness + 1

    def dispatch(self, readable: range) -> Dispatch:
        return Dispatch(version=readable[0])


class Alternating:
    """Replicas compute on the newest version or on the one before it. Notes when it was asked."""

    keep = 2

    def __init__(self) -> None:
        self.asked: list[int] = []

    def dispatch(self, readable: range) -> Dispatch:
        self.asked.append(readable[-1])
        return Dispatch(version=readable[readable[-1] % 2 - 1])


MODELS = {
    "synchronous": Synchronous(),
    "bounded by 0": Bounded(0),
    "1": Bounded(1),
    "2": Bounded(2),
}


def rows() -> list[tuple[list[float], list[float]]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 3, generator=generator)
    y = torch.sin(x.sum(1, keepdim=True))
    return list(zip(x.tolist(), y.tolist(), strict=True))


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def trainer(**changes: Any) -> sparkdl.Trainer:
    """A batch holds all rows, so that their order does not count."""
    values = {
        "model": network(),
        "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.Adam, lr=0.05),
        "batch_size": ROWS,
        "replicas": 2,
        "stop": sparkdl.max_iteration(ITERATIONS),
    }
    return sparkdl.Trainer(**{**values, **changes})


def plain(staleness: int) -> tuple[nn.Module, list[float]]:
    """The same in plain PyTorch: gradients of an older copy of the module, applied to the newest."""
    module = network()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    x, y = map(torch.tensor, zip(*rows(), strict=True))
    versions, losses = [copy.deepcopy(module)], []
    for _ in range(ITERATIONS):
        old = versions[max(0, len(versions) - 1 - staleness)]
        loss = nn.functional.mse_loss(old(x), y)
        gradients = torch.autograd.grad(loss, list(old.parameters()))
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        versions.append(copy.deepcopy(module))
        losses.append(loss.item())
    return module, losses


class Buffers(sparkdl.Callback):
    """Counts the buffers of states after each iteration."""

    def __init__(self, slabs: Callable[..., list[str]]) -> None:
        self.slabs, self.counts = slabs, list[int]()

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        found = [path for root in self.slabs() for path in Path(root).glob("state-*")]
        self.counts.append(len(found))


class Loss(sparkdl.Callback):
    """Deletes all slabs after iteration ``at``."""

    def __init__(self, slabs: Callable[..., list[str]], at: int) -> None:
        self.slabs, self.at, self.recoveries = slabs, at, 0

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        if state.iteration == self.at:
            for root in self.slabs():
                shutil.rmtree(root)

    def on_recovery(self, trainer: Any, state: Any) -> None:
        self.recoveries += 1


@pytest.fixture(scope="module")
def data(spark: Any) -> Any:
    return spark.createDataFrame(rows(), "features array<float>, label array<float>").coalesce(2)


@pytest.fixture
def fit(data: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Fits with a consistency model."""

    def run(model: Consistency, resume: str | None = None, **changes: Any) -> Any:
        engine = partial(ShuffleEngine, consistency=model)
        monkeypatch.setattr(registry, "ShuffleEngine", engine)
        return trainer(**changes).fit(data, resume=resume)

    return run


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_an_older_version(
    fit: Any, set_stages: Any, slabs: Any, name: str
) -> None:
    """In every form, with the same bits; and no more versions are kept than it takes."""
    model, trained = MODELS[name], []
    staleness = model.keep - 1
    for stages in ("shuffle", "two", "one"):
        set_stages(stages)
        buffers = Buffers(slabs)
        trained.append(fit(model, callbacks=[buffers]))
        assert buffers.counts[-1] == buffers.counts[staleness + 2]
    expected, losses = plain(staleness)
    for one in trained:
        assert one.history.losses == pytest.approx(losses, rel=1e-5)
        assert same(one.module, trained[0].module)
        for found, wanted in zip(one.module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    if staleness:
        assert losses[1] == losses[0]  # two iterations with the first version
        assert not same(trained[0].module, plain(0)[0])


def test_staleness_0_has_the_bits_of_the_default(fit: Any, data: Any) -> None:
    trained = fit(Bounded(0))
    assert same(trained.module, fit(None).module)
    assert same(trained.module, trainer(engine="local").fit(data).module)


@pytest.mark.parametrize("stages", ["one", "two"])
def test_what_is_repeated_after_a_loss_has_the_same_bits(
    fit: Any, set_stages: Any, slabs: Any, stages: str
) -> None:
    """The model is asked again about the iteration that was lost, not about those before it."""
    set_stages(stages)
    undisturbed = fit(Alternating())
    model, lost = Alternating(), Loss(slabs, at=4)
    trained = fit(model, callbacks=[lost])
    assert lost.recoveries == 1
    assert model.asked == [0, 1, 2, 3, 4, 4, 5]
    assert trained.history.losses == undisturbed.history.losses
    assert same(trained.module, undisturbed.module)
    assert not same(trained.module, plain(0)[0])
    assert not same(trained.module, fit(Bounded(1)).module)


def test_going_on_from_a_checkpoint_is_going_on(fit: Any, tmp_path: Path) -> None:
    """A checkpoint has one version, so the next iteration computes on that one in either case."""
    checkpoint = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(3))
    whole = fit(Bounded(2), checkpoint=checkpoint)
    kept, *later = sorted(tmp_path.iterdir())
    assert "0000000003" in kept.name
    for folder in later:
        shutil.rmtree(folder)
    again = fit(Bounded(2), checkpoint=checkpoint, resume="latest")
    assert again.history.losses == whole.history.losses
    assert same(again.module, whole.module)
    assert not same(whole.module, fit(Bounded(2)).module)


def test_a_version_that_nobody_has(fit: Any) -> None:
    class Wrong(Bounded):
        def dispatch(self, readable: range) -> Dispatch:
            return Dispatch(version=readable[-1] + 1)

    said = r"Wrong.dispatch returned version 1, but range\(0, 1\) are readable"
    with pytest.raises(ValueError, match=said):
        fit(Wrong(1))
