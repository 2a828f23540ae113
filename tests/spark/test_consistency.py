"""A consistency model decides which version replicas compute on, and what it decided is repeated."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import soak_but
from pyspark import cloudpickle
from small_networks import LosesSlabs, same
from torch import nn

import sparkdl
from sparkdl.consistency.base import Consistency, Dispatch

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS, ITERATIONS = 16, 6


class Alternating(Consistency):
    """Replicas compute on the newest version or on the one before it. Notes when it was asked."""

    keep = 2

    def __init__(self) -> None:
        self.asked: list[int] = []

    def dispatch(self, readable: range) -> Dispatch:
        self.asked.append(readable[-1])
        return Dispatch(version=readable[readable[-1] % 2 - 1])


MODELS = {
    "synchronous": sparkdl.Synchronous(),
    "0": sparkdl.StaleSynchronous(staleness=0),
    "1": sparkdl.StaleSynchronous(),
    "2": sparkdl.StaleSynchronous(staleness=2),
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


@pytest.fixture(scope="module")
def data(spark: Any) -> Any:
    return spark.createDataFrame(rows(), "features array<float>, label array<float>").coalesce(2)


@pytest.fixture
def fit(data: Any) -> Callable[..., Any]:
    """Fits with a consistency model."""

    def run(
        model: Consistency | None, resume: str | None = None, replay: Any = None, **changes: Any
    ) -> Any:
        return trainer(consistency=model, **changes).fit(data, resume=resume, replay=replay)

    return run


@pytest.mark.parametrize("name", soak_but(["2"], MODELS))
def test_gradients_are_those_of_an_older_version(
    fit: Any, set_stages: Any, slabs: Any, name: str
) -> None:
    """In every form and on "local", with the same bits; no more versions are kept than it takes."""
    model, trained = MODELS[name], []
    staleness = model.keep - 1
    for stages in ("shuffle", "two", "one"):
        set_stages(stages)
        buffers = Buffers(slabs)
        trained.append(fit(model, callbacks=[buffers]))
        assert buffers.counts[-1] == buffers.counts[staleness + 2]
    trained.append(fit(model, engine="local"))
    expected, losses = plain(staleness)
    for one in trained:
        assert one.history.losses == pytest.approx(losses, rel=1e-5)
        delays = [min(staleness, i) for i in range(ITERATIONS)]
        assert list(one.history.staleness.values()) == delays
        assert same(one.module, trained[0].module)
        for found, wanted in zip(one.module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    if staleness:
        assert losses[1] == losses[0]  # two iterations with the first version
        assert not same(trained[0].module, plain(0)[0])


def test_staleness_0_has_the_bits_of_the_default(fit: Any) -> None:
    trained = fit(sparkdl.StaleSynchronous(staleness=0))
    assert same(trained.module, fit(None).module)
    assert same(trained.module, fit(None, engine="local").module)
    assert same(trained.module, fit(sparkdl.Synchronous(), clip_norm=1e9).module)


@pytest.mark.parametrize(
    "changes",
    soak_but([{"clip_norm": 0.3}], [{"clip_norm": 0.3}, {"precision": "fp16"}, {"ema": 0.9}]),
    ids=str,
)
def test_what_goes_with_stale_gradients(fit: Any, changes: dict[str, Any]) -> None:
    model = sparkdl.StaleSynchronous(staleness=2)
    one, other = (fit(model, engine=engine, **changes) for engine in ("shuffle", "local"))
    assert one.history.losses == other.history.losses
    assert same(one.module, other.module)


@pytest.mark.parametrize("stages", soak_but(["one"], ["one", "two"]))
def test_what_is_repeated_after_a_loss_has_the_same_bits(
    fit: Any, set_stages: Any, slabs: Any, stages: str
) -> None:
    """The model is asked again about the iteration that was lost, not about those before it."""
    set_stages(stages)
    undisturbed = fit(Alternating())
    model, lost = Alternating(), LosesSlabs(slabs, at=4)
    trained = fit(model, callbacks=[lost])
    assert lost.recoveries == 1
    assert model.asked == [0, 1, 2, 3, 4, 4, 5]
    assert trained.history.losses == undisturbed.history.losses
    assert same(trained.module, undisturbed.module)
    assert not same(trained.module, plain(0)[0])
    assert not same(trained.module, fit(sparkdl.StaleSynchronous()).module)


@pytest.mark.soak
def test_going_on_from_a_checkpoint_is_going_on(fit: Any, tmp_path: Path) -> None:
    """A checkpoint has one version, so the next iteration computes on that one in either case."""
    checkpoint = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(3))
    whole = fit(sparkdl.StaleSynchronous(staleness=2), checkpoint=checkpoint)
    kept, *later = sorted(tmp_path.iterdir())
    assert "0000000003" in kept.name
    for folder in later:
        shutil.rmtree(folder)
    again = fit(sparkdl.StaleSynchronous(staleness=2), checkpoint=checkpoint, resume="latest")
    assert again.history.losses == whole.history.losses
    assert same(again.module, whole.module)
    assert not same(whole.module, fit(sparkdl.StaleSynchronous(staleness=2)).module)


def test_a_version_that_nobody_has(fit: Any) -> None:
    class Wrong(Consistency):
        def dispatch(self, readable: range) -> Dispatch:
            return Dispatch(version=readable[-1] + 1)

    said = r"Wrong.dispatch returned version 1, but range\(0, 1\) are readable"
    with pytest.raises(sparkdl.ParameterError, match=said):
        fit(Wrong())


def test_mistakes_of_an_own_model(fit: Any) -> None:
    class Number(Consistency):
        def dispatch(self, readable: range) -> Any:
            return readable[-1]

    class Nothing(Consistency):
        keep = 0

    with pytest.raises(sparkdl.ParameterError, match="dispatch returned an object of type int: "):
        fit(Number())
    with pytest.raises(sparkdl.ParameterError, match="consistency=Nothing: keep=0: give a whole"):
        fit(Nothing())
    with pytest.raises(sparkdl.ParameterError, match='Alternating with engine="gang": its ranks'):
        fit(Alternating(), engine="gang")


class Farther(Consistency):
    """Replicas compute on the newest version, or on the oldest one, by the newest one's number."""

    keep = 3

    def dispatch(self, readable: range) -> Dispatch:
        return Dispatch(version=readable[0] if readable[-1] % 2 else readable[-1])


def test_versions_have_the_same_numbers_on_both_engines(fit: Any) -> None:
    there, here = fit(Farther()), fit(Farther(), engine="local")
    assert list(there.history.staleness.values()) == [0, 1, 0, 2, 0, 2]
    assert here.history.staleness == there.history.staleness
    assert same(here.module, there.module)


@pytest.mark.parametrize("engine", soak_but(["local"], ["shuffle", "local"]))
def test_a_replay_has_the_bits_of_the_run(
    fit: Any, set_stages: Any, slabs: Any, tmp_path: Path, engine: str
) -> None:
    """On another engine, by way of a file, and after a loss; the model is not asked."""
    set_stages("two")
    checkpoint = sparkdl.Checkpoint(str(tmp_path / "c"), every=sparkdl.every(3))
    live = fit(Alternating(), checkpoint=checkpoint)
    assert list(live.history.staleness.values()) == [0, 1, 0, 0, 0, 1]  # 0 after the checkpoint
    live.history.save(tmp_path / "history.json")
    recorded = sparkdl.History.load(tmp_path / "history.json")
    assert recorded.settings == live.history.settings
    model = sparkdl.StaleSynchronous()
    callbacks = [] if engine == "local" else [LosesSlabs(slabs, at=3)]
    again = fit(model, replay=recorded, engine=engine, callbacks=callbacks)
    assert all(each.recoveries == 1 for each in callbacks)
    assert again.history.losses == live.history.losses
    assert again.history.staleness == live.history.staleness
    assert same(again.module, live.module)
    assert not same(again.module, fit(model, engine=engine).module)
    silent = Alternating()
    fit(silent, replay=recorded, engine=engine)
    assert silent.asked == []


def test_what_cannot_be_replayed(fit: Any, tmp_path: Path) -> None:
    live = fit(sparkdl.StaleSynchronous(staleness=2), engine="local")
    with pytest.raises(
        sparkdl.ParameterError, match=r"2 versions old.*StaleSynchronous\(staleness=2"
    ):
        fit(sparkdl.StaleSynchronous(), replay=live.history)
    with pytest.raises(
        sparkdl.ParameterError, match=r"an epoch of the history has .* batch_size= of the recorded"
    ):
        fit(
            sparkdl.StaleSynchronous(staleness=2), replay=live.history, batch_size=5, engine="local"
        )
    for name, here, there in (("seed", 7, live.history.settings["seed"]), ("accumulate", 2, 1)):
        said = f"recorded with {name}={there}, and this trainer has {name}={here}, so the bits"
        with pytest.raises(sparkdl.ParameterError, match=said):
            fit(
                sparkdl.StaleSynchronous(staleness=2),
                replay=sparkdl.History.from_bytes(live.history.to_bytes()),
                engine="local",
                **{name: here},
            )
    with pytest.raises(sparkdl.ParameterError, match="replay is a list: give the history of a run"):
        fit(None, replay=live.history.losses)
    checkpoint = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(3))
    with pytest.raises(
        sparkdl.ParameterError, match="with the same checkpoint= as the recorded run"
    ):
        fit(
            sparkdl.StaleSynchronous(staleness=2),
            replay=live.history,
            checkpoint=checkpoint,
            engine="local",
        )


def test_a_checkpoint_knows_its_consistency_model(fit: Any, tmp_path: Path) -> None:
    checkpoint = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(3))
    fit(sparkdl.StaleSynchronous(), checkpoint=checkpoint, engine="local")
    said = r"consistency is 'Synchronous\(.*\)' here and 'StaleSynchronous\(staleness=1\)' in"
    with pytest.raises(sparkdl.ParameterError, match=said):
        fit(None, checkpoint=checkpoint, resume="latest")


def test_what_is_no_consistency_model() -> None:
    for wrong in (-1, 1.5, True, 1 << 16):
        with pytest.raises(
            sparkdl.ParameterError, match="consistency=StaleSynchronous: staleness="
        ):
            trainer(consistency=sparkdl.StaleSynchronous(staleness=wrong))
    with pytest.raises(sparkdl.ParameterError, match=r"consistency is a str: give a consistency"):
        trainer(consistency="synchronous")
    with pytest.raises(
        sparkdl.ParameterError,
        match=r"consistency is the class Gossip: give an instance, Gossip\(\)\.$",
    ):
        trainer(consistency=sparkdl.Gossip)


def test_how_a_trainer_shows_it() -> None:
    shown = repr(trainer(consistency=sparkdl.StaleSynchronous(staleness=3)))
    assert "consistency=StaleSynchronous(staleness=3)" in shown
    assert "consistency" not in repr(trainer())
