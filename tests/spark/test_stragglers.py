"""A step or a round without slow replicas is made of what was done, and can be repeated."""

from __future__ import annotations

import copy
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
from sparkdl.consistency.base import StragglerLimit
from sparkdl.engines import registry
from sparkdl.engines.local.engine import LocalEngine
from sparkdl.replica.iteration import Limit, PassedParts

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS, PARTS, ITERATIONS = 8, 4, 6
DROP = sparkdl.Synchronous(drop_stragglers=0.5)
ROUNDS: dict[str, Any] = {
    "batch_size": 2 * ROWS // PARTS,
    "accumulate": 1,
    "consistency": sparkdl.DiLoCo(inner_steps=PARTS, drop_stragglers=0.5),
}
KINDS: dict[str, dict[str, Any]] = {"micro_batches": {}, "inner_steps": ROUNDS}
"""The kinds of parts that a replica leaves out, each with the changes to the trainer that has them."""
WHOLE: dict[str, dict[str, Any]] = {
    "micro_batches": {"consistency": None},
    "inner_steps": {**ROUNDS, "consistency": sparkdl.DiLoCo(inner_steps=PARTS)},
}
"""The same without a limit."""
kinds = pytest.mark.parametrize("kind", KINDS)
quick_kinds = pytest.mark.parametrize("kind", soak_but(["inner_steps"], KINDS))


class Slow(nn.Module):
    """The network, in which a forward pass of replica 0 takes four times as long."""

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


Passed = Mapping[int, tuple[int, ...]]


def plain(kind: str, passed: Passed) -> nn.Module:
    """The same in plain PyTorch, with what each replica did."""
    return plain_steps(passed) if kind == "micro_batches" else plain_rounds(passed)


def plain_steps(passed: Passed) -> nn.Module:
    """The mean over the rows of the micro-batches that were done."""
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


def plain_rounds(passed: Passed) -> nn.Module:
    """DiLoCo, in which each replica's difference counts the same, however many steps it made."""
    shared = network()
    outer = sparkdl.DiLoCo().outer_optimizer(shared.parameters())
    copies = [copy.deepcopy(shared) for _ in SAMPLES]
    inner = [torch.optim.Adam(module.parameters(), lr=0.05) for module in copies]
    for iteration in range(1, ITERATIONS + 1):
        steps = passed.get(iteration, (PARTS, PARTS))
        outer.zero_grad()
        for module, own, (x, y), count in zip(copies, inner, SAMPLES, steps, strict=True):
            module.load_state_dict(shared.state_dict())
            for _ in range(count):
                own.zero_grad()
                nn.functional.mse_loss(module(torch.tensor([x])), torch.tensor([y])).backward()
                own.step()
        for begin, *ends in zip(
            shared.parameters(), *(m.parameters() for m in copies), strict=True
        ):
            begin.grad = begin.detach() - sum(end.detach() for end in ends) / len(SAMPLES)
        outer.step()
    return shared


@kinds
def test_in_virtual_time(data: Any, virtual: None, kind: str) -> None:
    """The first iterations are measured; then the slow replica does one part of four."""
    slow = partial(Slow, virtual_time.sleep, 1.0)
    trained = trainer(engine="local", model=slow, **KINDS[kind]).fit(data)
    done = getattr(trained.history, kind)
    assert done == dict.fromkeys((4, 5, 6), (1, 4))
    close(trained.module.net, plain(kind, done))
    assert list(trained.history)[-1]["samples"] == 3 * 16 + 3 * 10


@quick_kinds
def test_too_little_is_done_again(data: Any, virtual: None, kind: str) -> None:
    """In iteration 5 both replicas stop after the first of four parts."""
    slow = partial(Slow, virtual_time.sleep, 1.0, both_at=17)
    trained = trainer(engine="local", model=slow, **KINDS[kind]).fit(data)
    done = getattr(trained.history, kind)
    assert done == dict.fromkeys((4, 6), (1, 4))
    close(trained.module.net, plain(kind, done))


@pytest.mark.parametrize("stages", soak_but(["two"], ["shuffle", "two", "one"]))
@pytest.mark.parametrize("kind", soak_but(["micro_batches"], KINDS))
def test_an_update_that_falls_short_does_not_count(
    data: Any, set_stages: Any, impatient: None, stages: str, kind: str
) -> None:
    set_stages(stages)
    trained = at_once(**KINDS[kind]).fit(data)
    assert getattr(trained.history, kind) == {}
    close(trained.module.net, plain(kind, {}))


@pytest.mark.parametrize("stages", soak_but(["one"], ["shuffle", "two", "one"]))
@quick_kinds
def test_what_was_done_counts_and_is_repeated(
    data: Any, set_stages: Any, slabs: Any, tmp_path: Path, stages: str, kind: str
) -> None:
    """With real sleeping, in every form; through losses, from a file, and on "local"."""
    set_stages(stages)
    lost = LosesSlabs(slabs, at=5)
    trained = trainer(callbacks=[lost], **KINDS[kind]).fit(data)
    history = trained.history
    done = getattr(history, kind)
    assert lost.recoveries == 1
    assert any(slow < PARTS for slow, _ in done.values())
    close(trained.module.net, plain(kind, done))
    for name in ("h.json", "h.csv"):
        history.save(tmp_path / name)
        recorded = sparkdl.History.load(tmp_path / name)
        assert recorded.decisions == history.decisions
    assert sparkdl.History.from_bytes(history.to_bytes()).decisions == history.decisions
    again = at_once(engine="local", **WHOLE[kind]).fit(data, replay=recorded)
    assert same(again.module, trained.module)
    assert again.history.decisions == history.decisions
    if stages == "one":
        lost = LosesSlabs(slabs, at=5)
        again = at_once(callbacks=[lost], **KINDS[kind]).fit(data, replay=history)
        assert lost.recoveries == 1
        assert same(again.module, trained.module)


VARIED: dict[str, dict[str, Any]] = {
    "clip_norm": {"clip_norm": 0.3, "slices": 2},
    "fp16": {"precision": "fp16"},
    "compression": {"compression": sparkdl.TopK(0.5)},
    "inner steps": {**ROUNDS, "clip_norm": 0.3, "slices": 2, "wire": "bf16", "accumulate": 2},
}


@pytest.mark.parametrize("case", soak_but(["compression", "inner steps"], VARIED))
def test_what_goes_with_it(data: Any, monkeypatch: Any, case: str) -> None:
    """Limits that end at once: every replica does one part."""
    limit, changes = Limit(seconds=0.0), VARIED[case]
    monkeypatch.setattr(StragglerLimit, "_limit", lambda self, step: limit)
    trained = at_once(**changes).fit(data)
    done = trained.history.inner_steps or trained.history.micro_batches
    assert done == dict.fromkeys(range(1, ITERATIONS + 1), (1, 1))
    again = at_once(engine="local", **changes).fit(data, replay=trained.history)
    assert same(again.module, trained.module)


def test_attempts_that_differ_are_not_mixed() -> None:
    from sparkdl.engines.shuffle.messages import UNLIKE, IterationReports
    from sparkdl.replica.iteration import SliceReport

    one, other = PassedParts(1, 4, 6), PassedParts(2, 4, 4)
    reports = [SliceReport(n, "here", None, passed=(p,)) for n, p in enumerate((one, other))]
    assert [fault.kind for fault in IterationReports.of(reports).faults] == [UNLIKE]
    assert not IterationReports.of([reports[0], reports[0]]).faults


@quick_kinds
@pytest.mark.soak
def test_going_on_from_a_checkpoint(data: Any, tmp_path: Path, kind: str) -> None:
    """The record of the first part is in the checkpoint."""
    checkpoint, changes = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(5)), KINDS[kind]
    trainer(checkpoint=checkpoint, stop=sparkdl.max_iteration(5), **changes).fit(data)
    whole = trainer(checkpoint=checkpoint, **changes).fit(data, resume="latest")
    assert set(getattr(whole.history, kind)) & {4, 5}
    again = at_once(engine="local", **changes).fit(data, replay=whole.history)
    assert same(whole.module, again.module)


def test_what_cannot_be_replayed(data: Any, virtual: None) -> None:
    slow = partial(Slow, virtual_time.sleep, 1.0)
    history = trainer(engine="local", model=slow).fit(data).history
    with pytest.raises(sparkdl.ParameterError, match="4 micro-batches, and this trainer has acc"):
        at_once(accumulate=1, consistency=None).fit(data, replay=history)
    with pytest.raises(sparkdl.ParameterError, match="which the ranks of a gang cannot"):
        at_once(engine="gang", consistency=None).fit(data, replay=history)
    with pytest.raises(sparkdl.ParameterError, match="2 replicas or more, and this run has 1"):
        at_once(replicas=1, engine="local").fit(data, replay=history)
    with pytest.raises(
        sparkdl.ParameterError, match="with replicas=2, and this trainer has replicas=4"
    ):
        at_once(replicas=4, engine="local").fit(data, replay=history)
    for model in (sparkdl.DiLoCo(inner_steps=2), sparkdl.Gossip()):
        with pytest.raises(sparkdl.ParameterError, match="which replicas with steps of their own"):
            at_once(consistency=model, engine="local").fit(data, replay=history)
    rounds = trainer(engine="local", model=slow, **ROUNDS).fit(data).history
    with pytest.raises(sparkdl.ParameterError, match="which only those of DiLoCo do: train with"):
        at_once(engine="local").fit(data, replay=rounds)
    fewer = {**ROUNDS, "consistency": sparkdl.DiLoCo(inner_steps=2)}
    with pytest.raises(sparkdl.ParameterError, match="4 steps of their own, and this trainer has"):
        at_once(engine="local", **fewer).fit(data, replay=rounds)
    with pytest.raises(
        sparkdl.ParameterError, match="steps of their own, which the ranks of a gang"
    ):
        at_once(engine="gang", **WHOLE["inner_steps"]).fit(data, replay=rounds)
