"""A step without slow replicas has the gradient of what was done, and can be repeated."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import virtual_time
from launch import soak_but
from pyspark import cloudpickle
from small_networks import SAMPLES, LosesSlabs, close, network, same
from torch import nn

import sparkdl
from sparkdl.consistency.stragglers import StragglerLimit
from sparkdl.engines import registry
from sparkdl.engines.local.engine import LocalEngine
from sparkdl.replica.iteration import Limit, PassedParts

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS, PARTS, ITERATIONS = 8, 4, 6
DROP = sparkdl.Synchronous(drop_stragglers=0.5)


class Slow(nn.Module):
    """The network, in which a micro-batch of replica 0 takes four times as long."""

    sparkdl_no_state = ("passes",)

    def __init__(self, sleep: Callable[[float], None], seconds: float, both_at: int = -1) -> None:
        super().__init__()
        self.net, self.sleep, self.seconds = network(), sleep, seconds
        self.both_at, self.passes = both_at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            slow = x[0, 0] > 0
            self.passes += not slow
            slow = slow or self.passes == self.both_at
            self.sleep(self.seconds * (4 if slow else 1))
        found: torch.Tensor = self.net(x)
        return found


def trainer(**changes: Any) -> sparkdl.Trainer:
    values = {
        "model": partial(Slow, time.sleep, 0.02),
        "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.Adam, lr=0.05),
        "batch_size": 2 * ROWS,
        "replicas": 2,
        "accumulate": PARTS,
        "consistency": DROP,
        "stop": sparkdl.max_iteration(ITERATIONS),
    }
    return sparkdl.Trainer(**{**values, **changes})


def at_once(**changes: Any) -> sparkdl.Trainer:
    """The same without a delay."""
    return trainer(model=partial(Slow, time.sleep, 0.0), **changes)


@pytest.fixture(scope="module")
def data(spark: Any) -> Any:
    rows = [sample for sample in SAMPLES for _ in range(ROWS)]
    return spark.sparkContext.parallelize(rows, 2)


@pytest.fixture
def virtual(monkeypatch: Any) -> None:
    """Lets "local" measure in virtual time."""

    def build(given: Any) -> LocalEngine:
        return LocalEngine(
            *(given.samples, given.run, given.payload, given.batch_size, given.validation),
            given.consistency,
            now=virtual_time.now,
        )

    monkeypatch.setitem(registry.ENGINES, "local", build)


@pytest.fixture
def impatient(monkeypatch: Any) -> None:
    """Every limit is over at once, and only one row may be left out."""
    limit = Limit(seconds=0.0, may_miss=1)
    monkeypatch.setattr(StragglerLimit, "_limit", lambda self, step: limit)


def plain(passed: Mapping[int, tuple[int, ...]]) -> nn.Module:
    """The same in plain PyTorch: the mean over the rows of the micro-batches that were done."""
    module = network()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    for iteration in range(1, ITERATIONS + 1):
        parts = passed.get(iteration, (PARTS, PARTS))
        rows = [s for s, n in zip(SAMPLES, parts, strict=True) for _ in range(n * ROWS // PARTS)]
        x, y = map(torch.tensor, zip(*rows, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    return module


def test_in_virtual_time(data: Any, virtual: None) -> None:
    """The first iterations are measured; then the slow replica does one micro-batch of four."""
    slow = partial(Slow, virtual_time.sleep, 1.0)
    trained = trainer(engine="local", model=slow).fit(data)
    assert trained.history.micro_batches == dict.fromkeys((4, 5, 6), (1, 4))
    close(trained.module.net, plain(trained.history.micro_batches))
    assert list(trained.history)[-1]["samples"] == 3 * 16 + 3 * 10


def test_too_little_is_done_again(data: Any, virtual: None) -> None:
    """In iteration 5 both replicas stop after the first of four micro-batches."""
    slow = partial(Slow, virtual_time.sleep, 1.0, both_at=17)
    trained = trainer(engine="local", model=slow).fit(data)
    assert trained.history.micro_batches == dict.fromkeys((4, 6), (1, 4))


@pytest.mark.parametrize("stages", soak_but(["two"], ["shuffle", "two", "one"]))
def test_an_update_that_falls_short_does_not_count(
    data: Any, set_stages: Any, impatient: None, stages: str
) -> None:
    set_stages(stages)
    trained = at_once().fit(data)
    assert trained.history.micro_batches == {}
    close(trained.module.net, plain({}))


@pytest.mark.parametrize("stages", soak_but(["one"], ["shuffle", "two", "one"]))
def test_what_was_done_counts_and_is_repeated(
    data: Any, set_stages: Any, slabs: Any, tmp_path: Path, stages: str
) -> None:
    """With real sleeping, in every form; through losses, from a file, and on "local"."""
    set_stages(stages)
    lost = LosesSlabs(slabs, at=5)
    trained = trainer(callbacks=[lost]).fit(data)
    history = trained.history
    assert lost.recoveries == 1
    assert any(slow < PARTS for slow, _ in history.micro_batches.values())
    close(trained.module.net, plain(history.micro_batches))
    for name in ("h.json", "h.csv"):
        history.save(tmp_path / name)
        recorded = sparkdl.History.load(tmp_path / name)
        assert recorded.decisions == history.decisions
    assert sparkdl.History.from_bytes(history.to_bytes()).decisions == history.decisions
    again = at_once(engine="local", consistency=None).fit(data, replay=recorded)
    assert same(again.module, trained.module)
    assert again.history.decisions == history.decisions
    if stages == "one":
        lost = LosesSlabs(slabs, at=5)
        again = at_once(callbacks=[lost]).fit(data, replay=history)
        assert lost.recoveries == 1
        assert same(again.module, trained.module)


@pytest.mark.parametrize(
    "changes",
    [{"clip_norm": 0.3, "slices": 2}, {"precision": "fp16"}, {"compression": sparkdl.TopK(0.5)}],
    ids=["clip_norm", "fp16", "compression"],
)
def test_what_goes_with_it(data: Any, monkeypatch: Any, changes: dict[str, Any]) -> None:
    """Limits that end at once: every replica does one micro-batch."""
    limit = Limit(seconds=0.0)
    monkeypatch.setattr(StragglerLimit, "_limit", lambda self, step: limit)
    trained = at_once(**changes).fit(data)
    assert trained.history.micro_batches == dict.fromkeys(range(1, ITERATIONS + 1), (1, 1))
    again = at_once(engine="local", **changes).fit(data, replay=trained.history)
    assert same(again.module, trained.module)


def test_attempts_that_differ_are_not_mixed() -> None:
    from sparkdl.engines.shuffle.faults import UNLIKE
    from sparkdl.engines.shuffle.reports import IterationReports
    from sparkdl.replica.iteration import SliceReport

    one, other = PassedParts(1, 4, 6), PassedParts(2, 4, 4)
    reports = [SliceReport(n, "here", None, passed=(p,)) for n, p in enumerate((one, other))]
    assert [fault.kind for fault in IterationReports.of(reports).faults] == [UNLIKE]
    assert not IterationReports.of([reports[0], reports[0]]).faults


def test_going_on_from_a_checkpoint(data: Any, tmp_path: Path) -> None:
    """The record of the first part is in the checkpoint."""
    checkpoint = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(5))
    trainer(checkpoint=checkpoint, stop=sparkdl.max_iteration(5)).fit(data)
    whole = trainer(checkpoint=checkpoint).fit(data, resume="latest")
    assert set(whole.history.micro_batches) & {4, 5}
    assert same(whole.module, at_once(engine="local").fit(data, replay=whole.history).module)


REFUSED = {
    "gang": ({"engine": "gang"}, 'with engine="gang": its ranks sum gradients while they compute'),
    "local steps": ({"local_steps": 2}, "with local_steps=2: a replica that left out steps"),
    "few parts": ({"accumulate": 3}, "with accumulate=3: a replica stops between micro-batches"),
    "all": ({"consistency": sparkdl.Synchronous(drop_stragglers=1)}, "drop_stragglers=1: give the"),
    "true": ({"consistency": sparkdl.Synchronous(drop_stragglers=True)}, "drop_stragglers=True: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_it(case: str) -> None:
    changes, said = REFUSED[case]
    with pytest.raises(sparkdl.ParameterError, match=said):
        trainer(**changes)


def test_what_cannot_be_replayed(data: Any, virtual: None) -> None:
    slow = partial(Slow, virtual_time.sleep, 1.0)
    history = trainer(engine="local", model=slow).fit(data).history
    with pytest.raises(sparkdl.ParameterError, match="4 micro-batches, and this trainer has acc"):
        at_once(accumulate=1, consistency=None).fit(data, replay=history)
    with pytest.raises(sparkdl.ParameterError, match="which the ranks of a gang cannot"):
        at_once(engine="gang", consistency=None).fit(data, replay=history)
    with pytest.raises(sparkdl.ParameterError, match="2 replicas or more, and this run has 1"):
        at_once(replicas=1, engine="local").fit(data, replay=history)
    with pytest.raises(sparkdl.ParameterError, match="has no replica 3, and this run has 4: train"):
        at_once(replicas=4, engine="local").fit(data, replay=history)
    for model in (sparkdl.DiLoCo(inner_steps=2), sparkdl.Gossip()):
        with pytest.raises(sparkdl.ParameterError, match="which replicas with steps of their own"):
            at_once(consistency=model, engine="local").fit(data, replay=history)
