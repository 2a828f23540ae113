"""Batch norm over all ranks: that of one process with all samples."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from gang_training import CLASSES, WIDTH, as_one_process, trainer_of
from mistakes import message_of
from pyspark import cloudpickle
from real_ranks import WORLD
from torch import nn

import sparkdl
from sparkdl import ModelError, ParameterError
from sparkdl.engines.gang.model_group import GlobalBatchNorm, synchronise
from sparkdl.replica.compute import padding_pass

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SIZES = (5, 1, 3, 0, 2, 2, 1, 4)  # of the ranks; one without samples keeps the others company
SHAPES = {"rows": (4,), "sequences": (4, 6), "images": (4, 3, 2)}


def norm(shape: tuple[int, ...], **how: Any) -> nn.Module:
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(shape) - 1]
    torch.manual_seed(0)
    module = kind(shape[0], **how).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def samples(shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(sum(SIZES), *shape, generator=generator, dtype=torch.float64)
    return 100.0 + 3.0 * values  # far from zero: a variance of squares would lose digits


def train(shape: tuple[int, ...], how: dict[str, Any], communicator: Any) -> dict[str, Any]:
    """One rank: output, gradients and running statistics after two passes."""
    rank = communicator.rank
    start, size = sum(SIZES[:rank]), SIZES[rank]
    module = norm(shape, **how)
    synchronise(module)
    assert type(module) is GlobalBatchNorm
    own = samples(shape)[start : start + size] if size else samples(shape)[:2]
    own = own.clone().requires_grad_()
    for _ in range(2):
        with padding_pass(not size):
            output = module(own)
        loss = (output * output.detach().cos()).sum() * (1.0 if size else 0.0)
        own.grad = None
        module.zero_grad()
        loss.backward()
    gradients = [p.grad for p in module.parameters()]
    return {
        "output": output.detach()[:size],
        "input": own.grad[:size],
        "gradients": gradients,
        "state": module.state_dict(),
    }


@pytest.mark.parametrize("how", [{}, {"momentum": None}, {"affine": False}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_that_of_one_process(ranks, shape, how):
    assert len(SIZES) == WORLD
    found = ranks.run(WORLD, partial(train, SHAPES[shape], how))
    module, everything = norm(SHAPES[shape], **how), samples(SHAPES[shape]).requires_grad_()
    for _ in range(2):
        output = module(everything)
        everything.grad = None
        module.zero_grad()
        (output * output.detach().cos()).sum().backward()
    close(torch.cat([rank["output"] for rank in found]), output.detach())
    close(torch.cat([rank["input"] for rank in found]), everything.grad)
    for number, parameter in enumerate(module.parameters()):
        close(sum(rank["gradients"][number] for rank in found), parameter.grad)
    for rank in found:
        assert rank["state"].keys() == module.state_dict().keys()
        for name, value in module.state_dict().items():
            close(rank["state"][name], value)


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
    )


@pytest.mark.parametrize(
    ("strategy", "sizes"), [("ddp", (14, 8)), ("zero1", (20, 2)), ("fsdp", (0, 22))]
)
def test_a_gang_trains_as_one_process_with_all_samples(parts, strategy, sizes):
    """Batches are all there is, so that they do not depend on the number of replicas."""
    rows = parts(*sizes)
    run = trainer_of(model=model, strategy=strategy, batch_size=22, sync_batchnorm=True)
    alone = {"replicas": 1, "slices": 1, "strategy": "ddp", "sync_batchnorm": False}
    there, here = as_one_process(run, rows, parts(22), **alone)
    assert type(there.module[1]) is nn.BatchNorm1d
    if strategy == "ddp":
        apart = replace(run, sync_batchnorm=False).fit(rows)
        assert apart.history.losses != pytest.approx(here.history.losses, rel=1e-3)


@pytest.mark.parametrize("strategy", ["ddp", sparkdl.DDP(bucket_cap_mb=1e-4), "fsdp"], ids=str)
def test_rows_without_weight_count_in_the_statistics(parts, strategy):
    """Also where a rank has no others: its layers have gradients through the statistics alone."""
    rows, whole = parts(14, 8), parts(22)
    for record in (*rows.records[1], *whole.records[0][14:]):
        record["weight"] = 0.0
    run = trainer_of(
        model=model, strategy=strategy, batch_size=22, sync_batchnorm=True, weight="weight"
    )
    alone = {"replicas": 1, "slices": 1, "strategy": "ddp", "sync_batchnorm": False}
    as_one_process(run, rows, whole, **alone)


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sync_batchnorm": 1}, ParameterError, "sync_batchnorm is an int: give True or False."),
    (
        {"sync_batchnorm": True, "engine": "shuffle"},
        ParameterError,
        'sync_batchnorm=True with engine="shuffle": only the replicas of a gang can communicate '
        'during a forward pass. Use engine="gang", or leave it out.',
    ),
    (
        {"sync_batchnorm": True, "accumulate": 2},
        ParameterError,
        "sync_batchnorm=True does not go with accumulate: leave one of the two out.",
    ),
    (
        {"sync_batchnorm": True, "compression": sparkdl.TopK(0.1)},
        ParameterError,
        "sync_batchnorm=True does not go with compression: leave one of the two out.",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), MISTAKES)
def test_mistakes(changes, error, message):
    assert message_of(error, trainer_of, **changes) == message


def test_a_sparse_table_does_not_go_with_it(parts):
    table = partial(nn.EmbeddingBag, 9, 3, sparse=True)
    with pytest.raises(ModelError, match="sync_batchnorm=True does not go with the embedding"):
        trainer_of(model=lambda: nn.Sequential(table()), sync_batchnorm=True).fit(parts(4, 4))


def test_single_rows_on_a_rank_are_enough(parts):
    """What batch norm needs are two rows of all ranks together."""
    rows, made = parts(4, 3), trainer_of(model=model, sync_batchnorm=True, batch_size=2)
    with pytest.raises(ModelError, match="iteration 4 of each epoch the whole batch gets one"):
        made.fit(rows)
    trained = replace(made, stop=sparkdl.max_iteration(3)).fit(rows)
    assert all(torch.isfinite(tensor).all() for tensor in trained.module.state_dict().values())
    with pytest.raises(ModelError, match=r"iteration \d of each epoch a replica gets one"):
        replace(made, sync_batchnorm=False).fit(rows)
