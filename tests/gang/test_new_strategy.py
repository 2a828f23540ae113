"""The strategies of a gang behind one seam, and one of this test's: its halves and a row are enough."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from all_gather import AllGather
from gang_training import refused, trainer_of, without_norm
from torch import nn
from without_spark import Parts

import sparkdl
from sparkdl import ModelError, ParameterError
from sparkdl.engines.gang.strategies.base import RankStrategy, rank_half
from sparkdl.parallel import plan
from sparkdl.parallel.base import DIMENSIONS

pytestmark = pytest.mark.gang
ROWS, STEPS = (5, 3), 4


@pytest.fixture
def row(monkeypatch):
    """The row of the strategy, by which its word is known."""
    monkeypatch.setitem(plan.STRATEGIES, "all-gather", AllGather())


@pytest.mark.parametrize("word", plan.STRATEGIES)
def test_every_strategy_names_its_half_on_the_ranks(word):
    strategy = plan.STRATEGIES[word]
    assert issubclass(rank_half(strategy), RankStrategy)
    assert strategy.dimension in DIMENSIONS
    assert list(strategy.problems()) == []


def plain_torch(rows: Parts, start: dict[str, torch.Tensor]) -> tuple[nn.Module, list[float]]:
    """All rows at once in plain torch: the module and the losses."""
    records = [record for part in rows.records for record in part]
    features = torch.tensor([record["features"] for record in records], dtype=torch.float32)
    labels = torch.tensor([record["label"] for record in records])
    module, losses = without_norm(), []
    module.load_state_dict(start)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(module(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return module, losses


@pytest.mark.parametrize("strategy", ["all-gather", AllGather(descending=True)], ids=str)
def test_a_new_strategy_trains_as_plain_torch(row, parts, strategy):
    """Ranks have different numbers of rows, and the batch is all of them, in whatever order."""
    start = without_norm().state_dict()
    run = trainer_of(
        model=without_norm,
        weights=start,
        strategy=strategy,
        batch_size=sum(ROWS),
        stop=sparkdl.max_iteration(STEPS),
    )
    rows = parts(*ROWS)
    trained = run.fit(rows)
    module, losses = plain_torch(rows, start)
    assert trained.history.losses == pytest.approx(losses, rel=1e-5)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(trained.module.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(4, 3, sparse=True, mode="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x > 0).long())


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "its options": (
        {"strategy": AllGather(descending=3)},  # type: ignore[arg-type]
        ParameterError,
        "strategy=AllGather(descending=3): give True or False.",
    ),
    "its class": (
        {"strategy": AllGather},
        ParameterError,
        f"strategy is the class AllGather: give an instance, sparkdl.{AllGather.__name__}().",
    ),
    "other fields": (
        {"strategy": "all-gather", "compression": sparkdl.PowerSGD(1)},
        ParameterError,
        "compression does not go with all-gather.",
    ),
    "one that splits the model": (
        {"strategy": ["all-gather", "fsdp"], "mesh": {"data": 1, "shard": 2}},
        ParameterError,
        'strategy: "all-gather" and "fsdp" do not go together. "fsdp", "tensor" and "pipeline" do, '
        'copies of what they cut are mesh={"data": ...}, and "zero1" shares the update among these.',
    ),
    "the model": (
        {"strategy": "all-gather", "model": Sparse, "optimizer": partial(torch.optim.SGD, lr=0.1)},
        ModelError,
        'strategy="all-gather" does not go with the embedding "table", which has sparse=True: use '
        'strategy="zero1", or sparse=False.',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(row, parts, case):
    changes, error, message = REFUSED[case]
    refused(lambda: trainer_of(**changes), parts(*ROWS), error, message)
