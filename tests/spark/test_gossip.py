"""Gossip is what a plain PyTorch loop of the algorithm computes, on a gang as in one process."""

from __future__ import annotations

import copy
import itertools
import math
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import soak_but
from pyspark import cloudpickle
from small_networks import close, network, normed, same
from torch import nn

import sparkdl
from sparkdl.consistency.gossip import TOPOLOGIES

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS, ROUNDS, REPLICAS = 8, 5, 4
SAMPLES = [
    ([1.0, 0.5, -1.0], [1.0]),
    ([-0.5, 2.0, 0.3], [-1.0]),
    ([0.1, -0.4, 1.5], [0.5]),
    ([-2.0, 0.2, 0.7], [0.0]),
]
"""The sample of each replica, of which it has copies alone, so that their order does not count."""
GANG: dict[str, Any] = {"engine": "gang", "replicas": 2}
OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, lr=0.05),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
}


def trainer(topology: str | None = "ring", **changes: Any) -> sparkdl.Trainer:
    values: dict[str, Any] = {
        "model": network(),
        "loss": nn.MSELoss(),
        "optimizer": OPTIMIZERS["Adam"],
        "batch_size": 8,
        "replicas": REPLICAS,
        "engine": "local",
        "consistency": None if topology is None else sparkdl.Gossip(topology=topology),
        "stop": sparkdl.max_iteration(ROUNDS),
    }
    return sparkdl.Trainer(**{**values, **changes})


@pytest.fixture(scope="module")
def data(spark: Any) -> Any:
    rows = [sample for sample in SAMPLES for _ in range(ROWS)]
    return spark.sparkContext.parallelize(rows, REPLICAS)


@pytest.fixture(scope="module")
def pair(spark: Any) -> Any:
    """Rows for two replicas."""
    rows = [sample for sample in SAMPLES[:2] for _ in range(2 * ROWS)]
    return spark.sparkContext.parallelize(rows, 2)


def weighted(spark: Any, *sizes: int) -> Any:
    """Rows of different weights, and unlike numbers of them for each replica."""
    generator = torch.Generator().manual_seed(3)
    rows = [
        (row[:3], row[3:4], 1.0 + n % 3)
        for size in sizes
        for n, row in enumerate(torch.randn(size, 5, generator=generator).tolist())
    ]
    placed = spark.sparkContext.parallelize(rows, len(sizes))
    return spark.createDataFrame(
        placed, "features array<double>, label array<double>, weight double"
    )


def matrix(topology: str, size: int, iteration: int) -> torch.Tensor:
    found = torch.zeros(size, size, dtype=torch.float64)
    for places, weight in TOPOLOGIES[topology](size, iteration).items():
        for replica in range(size):
            found[replica, (replica - places) % size] += weight
    return found


def plain(topology: str) -> tuple[nn.Module, list[float]]:
    """The algorithm: the mean of the replicas, and the distances before each average."""
    copies, distances = [network() for _ in SAMPLES], []
    optimizers = [OPTIMIZERS["Adam"](module.parameters()) for module in copies]
    for iteration in range(ROUNDS):
        for module, optimizer, (x, y) in zip(copies, optimizers, SAMPLES, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(module(torch.tensor([x])), torch.tensor([y])).backward()
            optimizer.step()
        vectors = torch.stack([nn.utils.parameters_to_vector(m.parameters()) for m in copies])
        weights = matrix(topology, REPLICAS, iteration)
        distance = torch.cdist(vectors.detach(), vectors.detach())
        neighbours = ((weights > 0) & ~torch.eye(REPLICAS, dtype=torch.bool)).double()
        squares = (distance.double() ** 2 * neighbours).sum(1) / neighbours.sum(1)
        distances.append(float(squares.sqrt().mean()))
        for module, vector in zip(copies, weights.float() @ vectors, strict=True):
            nn.utils.vector_to_parameters(vector, module.parameters())
    mean = copy.deepcopy(copies[0])
    vectors = torch.stack([nn.utils.parameters_to_vector(m.parameters()) for m in copies])
    nn.utils.vector_to_parameters(vectors.mean(0), mean.parameters())
    return mean, distances


def distances(trained: sparkdl.TrainedModel) -> list[float]:
    return trained.history.named_losses["replica_distance"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_it_is_the_algorithm(data: Any, topology: str) -> None:
    found = trainer(topology).fit(data)
    expected, apart = plain(topology)
    close(found.module, expected, 1e-5, 1e-5)
    assert distances(found) == pytest.approx(apart, rel=1e-4)


@pytest.mark.soak
@pytest.mark.gang
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_four_ranks_have_the_bits_of_one_process(data: Any, topology: str) -> None:
    here = trainer(topology).fit(data)
    there = trainer(topology, engine="gang", min_ranks=1).fit(data)
    assert same(there.module, here.module)
    assert there.history.losses == here.history.losses
    assert distances(there) == distances(here)


@pytest.mark.parametrize(
    "changes", soak_but([{"weight": "weight"}], [{"weight": "weight"}, {"batch_size": 3}]), ids=str
)
def test_the_complete_topology_is_data_parallelism(spark: Any, changes: dict[str, Any]) -> None:
    """With SGD, also of unlike numbers of rows and none, and of rows of different weights."""
    varied = weighted(spark, 12, 8, 9, 11)
    changes = {"optimizer": OPTIMIZERS["SGD"], "stop": sparkdl.max_epoch(2), **changes}
    all_in_one = trainer(None, **changes).fit(varied)
    gossip = trainer("complete", **changes).fit(varied)
    close(gossip.module, all_in_one.module, 1e-6, 1e-6)
    assert gossip.history.losses == pytest.approx(all_in_one.history.losses, rel=1e-5)


VARIED: dict[str, dict[str, Any]] = {
    "norm, bf16": {"model": normed, "wire": "bf16", "batch_size": 20},
    "weights, ranks without rows": {"weight": "weight", "batch_size": 3, "accumulate": 2},
    "clipped, scheduled": {
        "clip_norm": 0.05,
        "l2": 0.01,
        "schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    },
}


@pytest.mark.gang
@pytest.mark.parametrize("case", soak_but(["norm, bf16"], VARIED))
def test_what_goes_with_it_has_the_bits_of_one_process(spark: Any, case: str) -> None:
    rows = weighted(spark, 24, 16)
    changes = {"stop": sparkdl.max_epoch(2), **VARIED[case]}
    changes["validation"] = sparkdl.Validation(rows, metrics=["loss"], best="loss")
    here, there = (trainer(**{**GANG, "engine": e, **changes}).fit(rows) for e in ("local", "gang"))
    assert same(there.module, here.module)
    assert distances(there) == distances(here)
    assert there.history.validations == here.history.validations
    assert there.best is not None
    assert here.best is not None
    assert same(there.best.module, here.best.module)


@pytest.mark.gang
@pytest.mark.soak
def test_it_goes_on_from_a_checkpoint(pair: Any, tmp_path: Path) -> None:
    """With the weights and the optimizer of each replica, on both engines."""
    checkpoint = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(2))
    whole = trainer(checkpoint=checkpoint, **GANG).fit(pair)
    assert same(whole.module, trainer(replicas=2).fit(pair).module)
    for engine in ("gang", "local"):
        shutil.rmtree(sorted(tmp_path.iterdir())[-1])
        run = trainer(checkpoint=checkpoint, replicas=2, engine=engine)
        again = run.fit(pair, resume="latest")
        assert same(again.module, whole.module)
        assert distances(again) == distances(whole)


class Mortal(nn.Module):
    """Kills its process once, in the third forward pass of replica 1."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.layers, self.marker = network(), marker
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        there = int(self.calls) == 3 and self.training and float(x[0, 0]) == SAMPLES[1][0][0]
        if there and not os.path.exists(self.marker):
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        found: torch.Tensor = self.layers(x)
        return found


@pytest.mark.gang
def test_it_goes_on_after_a_rank_was_lost(pair: Any, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    changes = {"checkpoint": sparkdl.Checkpoint(str(tmp_path / "c"), every=sparkdl.every(2))}
    lost = trainer(model=partial(Mortal, str(marker)), **GANG, **changes).fit(pair)
    assert marker.exists()
    undisturbed = trainer(model=partial(Mortal, str(marker)), replicas=2).fit(pair)
    assert same(lost.module, undisturbed.module)
    assert distances(lost) == distances(undisturbed)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size", range(1, 10))
def test_the_weights_are_doubly_stochastic(topology: str, size: int) -> None:
    for iteration in range(5):
        weights = matrix(topology, size, iteration)
        for dimension in (0, 1):
            assert weights.sum(dimension).tolist() == pytest.approx([1.0] * size)


def spread(spark: Any, topology: str, size: int, iterations: int) -> list[float]:
    """The distances from the second iteration on, after which the learning rate is 0."""
    rows = [([float(r), 1.0, -r / 2], [r / 3]) for r in range(size) for _ in range(ROWS)]
    run = trainer(
        topology,
        replicas=size,
        batch_size=size,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: float(n < 2)
        ),
        stop=sparkdl.max_iteration(2 + iterations),
    )
    return distances(run.fit(spark.sparkContext.parallelize(rows, size)))[1:]


def test_consensus_comes_at_the_rate_of_the_spectral_gap(spark: Any) -> None:
    found = spread(spark, "ring", 7, 14)[1:]
    second = (1 + 2 * math.cos(2 * math.pi / 7)) / 3
    rates = [after / before for before, after in itertools.pairwise(found)]
    assert max(rates) <= second + 1e-3
    assert rates[-1] == pytest.approx(second, rel=1e-2)


@pytest.mark.parametrize(
    ("topology", "size", "rounds"), [("exponential", 8, 3), ("complete", 5, 0)]
)
def test_some_topologies_reach_the_mean(spark: Any, topology: str, size: int, rounds: int) -> None:
    before, *after = spread(spark, topology, size, rounds + 1)
    assert before > 1e-2
    assert after[rounds] < 1e-6


@pytest.mark.parametrize("topology", soak_but(["ring"], TOPOLOGIES))
def test_it_converges_on_a_convex_problem(spark: Any, topology: str) -> None:
    """Each replica's rows have another optimum; the result has that of all of them."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(REPLICAS, 16, 3, generator=generator)
    y = (x * torch.randn(REPLICAS, 1, 3, generator=generator)).sum(2, keepdim=True)
    rows = list(zip(x.flatten(0, 1).tolist(), y.flatten(0, 1).tolist(), strict=True))
    run = trainer(
        topology,
        model=partial(nn.Linear, 3, 1, bias=False),
        optimizer=partial(torch.optim.SGD, lr=0.2),
        batch_size=len(rows),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: 1 / (1 + n / 10)
        ),
        stop=sparkdl.max_iteration(150),
    )
    found = run.fit(spark.sparkContext.parallelize(rows, REPLICAS)).module
    best = torch.linalg.lstsq(x.flatten(0, 1), y.flatten(0, 1)).solution
    assert float((found.weight.detach().T - best).norm() / best.norm()) < 0.02


def test_the_next_run_begins_with_the_mean(data: Any) -> None:
    first = trainer().fit(data)
    still = trainer(optimizer=partial(torch.optim.SGD, lr=0.0), stop=sparkdl.max_iteration(2))
    again = still.fit(data, start=first)
    assert same(again.module, first.module)
    assert distances(again) == [0.0, 0.0]


def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean of squares that is infinite if one of the targets is large."""
    return ((output - target) ** 2 / (target < 50)).mean()


@pytest.mark.gang
def test_an_iteration_that_is_not_finite_is_skipped_by_all(spark: Any) -> None:
    rows = [([float(n // 4), 1.0, 1.0], [100.0 if n == 1 else 1.0]) for n in range(8)]
    placed = spark.sparkContext.parallelize(rows, 2)
    changes = {"loss": fails, "on_nan": "skip", "batch_size": 2, "stop": sparkdl.max_epoch(2)}
    here, there = trainer(replicas=2, **changes).fit(placed), trainer(**GANG, **changes).fit(placed)
    assert [record["skipped"] for record in there.history].count(True) == 2
    assert same(there.module, here.module)
