"""Asynchronous steps are what their record says, which is repeated with the same bits."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import soak_but
from pyspark import cloudpickle
from small_networks import SAMPLES, LosesSlabs, close, network, same
from torch import nn

import sparkdl
from sparkdl.consistency.asynchronous import Turn
from sparkdl.engines import registry
from sparkdl.engines.local.engine import LocalGroupEngine

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS, ITERATIONS = 16, 6
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
ADAM = partial(torch.optim.Adam, lr=0.05)


class Slow(nn.Module):
    """The network, which takes a moment, and four times as long in replica 0."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__()
        self.net, self.seconds = network(), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.seconds * (4 if x[0, 0] > 0 else 1))
        found: torch.Tensor = self.net(x)
        return found


def trainer(**changes: Any) -> sparkdl.Trainer:
    values = {
        "model": Slow,
        "loss": nn.MSELoss(),
        "optimizer": SGD,
        "batch_size": ROWS // 2,
        "replicas": 2,
        "consistency": sparkdl.Asynchronous(),
        "stop": sparkdl.max_iteration(ITERATIONS),
    }
    return sparkdl.Trainer(**{**values, **changes})


def at_once(**changes: Any) -> sparkdl.Trainer:
    """The same without a delay."""
    return trainer(model=partial(Slow, 0.0), **changes)


@pytest.fixture(scope="module")
def data(spark: Any) -> Any:
    rows = [sample for sample in SAMPLES for _ in range(ROWS // 2)]
    return spark.sparkContext.parallelize(rows, 2)


@pytest.fixture
def delays(monkeypatch: Any) -> Callable[[Callable[[Turn], float]], None]:
    """Sets the virtual time that turns take on "local"."""

    known = registry.ENGINES["local"]

    def set_to(seconds: Callable[[Turn], float]) -> None:
        def build(given: Any) -> Any:
            if given.consistency == sparkdl.Synchronous():
                return known(given)
            return LocalGroupEngine(
                *(given.samples, given.run, given.payload, given.batch_size, given.validation),
                given.consistency,
                given.recorded,
                seconds,
            )

        monkeypatch.setitem(registry.ENGINES, "local", build)

    return set_to


def plain(history: sparkdl.History, optimizer: Any, rate: float, quorum: int = 1) -> nn.Module:
    """The same in plain PyTorch: gradients of older copies of the module, applied in order."""
    module = network()
    stepping = optimizer(module.parameters())
    for group in stepping.param_groups:
        group["lr"] *= rate
    versions = [copy.deepcopy(module)]
    arrivals = [each for _, found in sorted(history.commits.items()) for each in found]
    for first in range(0, len(arrivals), quorum):
        stepping.zero_grad()
        for replica, behind, _ in arrivals[first : first + quorum]:
            old = versions[len(versions) - 1 - behind]
            x, y = (torch.tensor([part]) for part in SAMPLES[replica])
            loss = nn.functional.mse_loss(old(x), y) / quorum
            gradients = torch.autograd.grad(loss, list(old.parameters()))
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = gradient + (0 if parameter.grad is None else parameter.grad)
        stepping.step()
        versions.append(copy.deepcopy(module))
    return module


def turns(history: sparkdl.History, group: int) -> int:
    """Return how many gradients of a group were applied."""
    return sum(found[0] == group for made in history.commits.values() for found in made)


def test_in_virtual_time(data: Any, delays: Any) -> None:
    """A group that is four times as slow has a gradient for four of the other's."""
    delays(lambda turn: 4.0 if turn.group == 0 else 1.0)
    trained = at_once(engine="local").fit(data)
    commits = trained.history.commits
    assert commits[1] == ((1, 0, 0), (1, 0, 1))
    assert commits[2] == ((1, 0, 1), (0, 3, -1))
    assert [turns(trained.history, group) for group in (0, 1)] == [2, 10]
    assert max(trained.history.staleness.values()) == 4
    close(trained.module.net, plain(trained.history, SGD, 0.5))


def test_a_bound_on_the_lead(data: Any, delays: Any) -> None:
    delays(lambda turn: 4.0 if turn.group == 0 else 1.0)
    model = sparkdl.Asynchronous(staleness=1)
    trained = at_once(engine="local", consistency=model, optimizer=ADAM).fit(data)
    clocks, most = [0, 0], 0
    for made in trained.history.commits.values():
        for group, _, _ in made:
            clocks[group] += 1
            most = max(most, clocks[1] - clocks[0])
    assert most == 2  # begun at a lead of 1
    close(trained.module.net, plain(trained.history, ADAM, math.sqrt(0.5)))


@pytest.mark.parametrize(
    "model",
    soak_but([{"quorum": 2, "staleness": 0}], [{"quorum": 2, "staleness": 0}, {"groups": 1}]),
    ids=str,
)
def test_a_quorum_of_all_has_the_bits_of_synchronous(data: Any, model: dict[str, int]) -> None:
    model = sparkdl.Asynchronous(**model)
    wanted = at_once(engine="local", consistency=None).fit(data)
    for engine in ("shuffle", "local"):
        trained = at_once(consistency=model, engine=engine).fit(data)
        assert trained.history.losses == wanted.history.losses
        assert trained.history.staleness == wanted.history.staleness
        assert same(trained.module, wanted.module)


def test_live_and_replayed(data: Any, slabs: Any, tmp_path: Path) -> None:
    """Through a loss of the state, from a file, on both engines and at other speeds."""
    lost = LosesSlabs(slabs, at=4)
    trained = trainer(callbacks=[lost], optimizer=ADAM, slices=1).fit(data)
    history = trained.history
    assert lost.recoveries == 1
    assert max(history.staleness.values()) >= 1
    close(trained.module.net, plain(history, ADAM, math.sqrt(0.5)))
    history.save(tmp_path / "history.csv")
    recorded = sparkdl.History.load(tmp_path / "history.csv")
    assert recorded.commits == history.commits
    lost = LosesSlabs(slabs, at=3)
    for again in (
        at_once(engine="local", optimizer=ADAM),
        at_once(callbacks=[lost], optimizer=ADAM),
    ):
        found = again.fit(data, replay=recorded)
        assert found.history.commits == history.commits
        assert found.history.losses == history.losses
        assert same(found.module, trained.module)
    assert lost.recoveries == 1


@pytest.mark.soak
def test_going_on_from_a_checkpoint(data: Any, tmp_path: Path) -> None:
    """Nothing that was under way crosses it, so a replay with the same checkpoints goes through."""
    checkpoint = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(3))
    trainer(checkpoint=checkpoint, stop=sparkdl.max_iteration(4)).fit(data)
    whole = trainer(checkpoint=checkpoint).fit(data, resume="latest")
    assert list(whole.history.commits) == list(range(1, ITERATIONS + 1))
    close(whole.module.net, plain(whole.history, SGD, 0.5))
    again = at_once(engine="local").fit(data, replay=whole.history)
    assert same(again.module, whole.module)


@pytest.mark.parametrize(
    "changes",
    [
        {"clip_norm": 0.3, "slices": 1},
        pytest.param({"precision": "bf16", "accumulate": 2}, marks=pytest.mark.soak),
    ],
    ids=["clip_norm", "bf16"],
)
def test_what_goes_with_it(data: Any, changes: dict[str, Any]) -> None:
    trained = at_once(**changes).fit(data)
    assert same(
        at_once(engine="local", **changes).fit(data, replay=trained.history).module, trained.module
    )


def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean of squares that is infinite where the target is that of replica 1."""
    return ((output - target) ** 2 / (target > 0)).mean()


@pytest.mark.soak
def test_gradients_that_are_not_finite_are_left_out(data: Any) -> None:
    """So the newest version is often the one before, whose buffers stay."""
    changes = {"loss": fails, "on_nan": "skip", "stop": sparkdl.max_iteration(12)}
    trained = at_once(**changes).fit(data)
    assert turns(trained.history, 1) >= 4
    again = at_once(engine="local", **changes).fit(data, replay=trained.history)
    assert same(again.module, trained.module)
    with pytest.raises(sparkdl.TrainingError, match=r"not finite: the loss \(inf\) in replica 1"):
        at_once(loss=fails).fit(data)


@pytest.mark.parametrize("engine", soak_but(["shuffle"], ["shuffle", "local"]))
def test_groups_without_rows(data: Any, engine: str) -> None:
    """A batch of one row is one of the replicas'; the gradient of the other changes nothing."""
    changes = {"batch_size": 1, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    trained = at_once(engine=engine, **changes).fit(data)
    again = at_once(engine="local", **changes).fit(data, replay=trained.history)
    assert same(again.module, trained.module)
    assert not same(trained.module.net, network())


@pytest.mark.soak
def test_buffers_do_not_pile_up(data: Any, slabs: Any) -> None:
    class Buffers(sparkdl.Callback):
        def __init__(self) -> None:
            self.counts: list[int] = []

        def on_iteration_end(self, trainer: Any, state: Any) -> None:
            self.counts.append(sum(len(list(Path(root).glob("*-*"))) for root in slabs()))

    buffers = Buffers()
    at_once(stop=sparkdl.max_iteration(40), callbacks=[buffers]).fit(data)
    assert max(buffers.counts[20:]) <= max(buffers.counts[:20]) + 2


@pytest.mark.soak
def test_what_cannot_be_replayed(data: Any, delays: Any, tmp_path: Path) -> None:
    live = at_once(engine="local").fit(data)
    delays(lambda turn: 4.0 if turn.group == 0 else 1.0)
    lagging = at_once(engine="local").fit(data)
    with pytest.raises(sparkdl.ParameterError, match="has the order of asynchronous steps: train"):
        at_once(consistency=None).fit(data, replay=live.history)
    checkpoint = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(3))
    with pytest.raises(sparkdl.ParameterError, match=r"iteration 5 .* before a checkpoint of this"):
        at_once(engine="local", checkpoint=checkpoint).fit(data, replay=lagging.history)
    plain = at_once(engine="local", consistency=None).fit(data)
    with pytest.raises(sparkdl.ParameterError, match="has no order of steps: train with the con"):
        at_once().fit(data, replay=plain.history)
    for model, said in (
        (sparkdl.Asynchronous(groups=1), "has 2 gradients, and this run has 1 groups: train"),
        (sparkdl.Asynchronous(quorum=2), "steps of 1 gradients, and this run has quorum=2: train"),
    ):
        for replicas in (2, None):
            again = at_once(engine="local", consistency=model, replicas=replicas)
            with pytest.raises(sparkdl.ParameterError, match=said):
                again.fit(data, replay=live.history)
