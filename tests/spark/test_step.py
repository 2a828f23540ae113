"""Steps of the user give what a plain loop gives, on every engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launch import soak_but
from pyspark import cloudpickle
from torch import nn

import sparkdl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

COUNT = 30


class Order(nn.Module):
    """Two outputs of one body."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(2, 8), nn.Tanh())
        self.heads = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        amount, returned = self.heads(self.body(x)).unbind(1)
        return {"amount": amount, "returned": returned}


def both(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Two losses with weights, and the mean over some of the rows beside them."""
    found = module(batch["x"])
    amount = F.mse_loss(found["amount"], batch["amount"])
    returned = F.binary_cross_entropy_with_logits(found["returned"], batch["returned"])
    some = batch["returned"] > 0
    error = (found["amount"] - batch["amount"])[some].abs()
    return {
        "loss": amount + 0.5 * returned,
        "amount": amount,
        "returned": returned,
        "error of returned": (error.sum(), some.sum()),
    }


def where_returned(module: Any, batch: dict[str, torch.Tensor]) -> Any:
    """A mean over some of the rows, of which replicas have unequal numbers."""
    wrong = F.mse_loss(module(batch["x"])["amount"], batch["amount"], reduction="none")
    return (wrong * batch["returned"]).sum(), batch["returned"].sum()


@pytest.fixture(scope="module")
def orders(spark: SparkSession) -> DataFrame:
    return spark.range(COUNT, numPartitions=2).selectExpr(
        "array(float(id % 7) / 7, float(id % 5) / 5) AS x",
        "float(id % 7) / 3 AS amount",
        "float(id % 3 = 0 AND id < 20) AS returned",
    )


TRAINER = sparkdl.Trainer(
    model=Order,
    step=both,
    optimizer=partial(torch.optim.Adam, lr=0.05),
    features="x",
    label=["amount", "returned"],
    batch_size=COUNT,  # all of them, in any order
    replicas=2,
    engine="local",
    stop=sparkdl.max_iteration(4),
)


def plain_loop(orders: DataFrame, step: Any, rounds: int = 4) -> list[dict[str, float]]:
    rows = orders.toPandas()
    names = ("x", "amount", "returned")
    batch = {name: torch.tensor(np.stack(rows[name]), dtype=torch.float32) for name in names}
    module = Order()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    told = []
    for _ in range(rounds):
        losses = step(module, batch)
        losses = losses if isinstance(losses, dict) else {"loss": losses}
        means = {n: v[0] / v[1] if isinstance(v, tuple) else v for n, v in losses.items()}
        optimizer.zero_grad()
        means["loss"].backward()
        optimizer.step()
        told.append({name: mean.item() for name, mean in means.items()})
    return told


class Watch(sparkdl.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_iteration_end(self, trainer: Any, state: sparkdl.TrainState) -> None:
        self.seen.append({"loss": state.loss, **state.losses})


ENGINES = [
    {"engine": "local"},
    pytest.param({"engine": "local", "accumulate": 3, "precision": "bf16"}, marks=pytest.mark.soak),
    {"engine": "shuffle"},
    pytest.param(
        {"engine": "gang", "strategy": "zero1"}, marks=[pytest.mark.gang, pytest.mark.soak]
    ),
    pytest.param({"engine": "gang", "strategy": "fsdp"}, marks=pytest.mark.gang),
]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda given: "-".join(map(str, given.values())))
def test_named_losses_on_every_engine(orders: DataFrame, engine: dict[str, Any]) -> None:
    watch = Watch()
    trained = replace(TRAINER, **engine, callbacks=[watch]).fit(orders)
    expected = plain_loop(orders, both)
    rounding = 0.03 if "precision" in engine else 1e-4
    for i, losses in enumerate(expected):
        assert watch.seen[i] == pytest.approx(losses, rel=rounding)
    named = trained.history.named_losses
    assert {name: values[3] for name, values in named.items()} == pytest.approx(
        {name: value for name, value in expected[3].items() if name != "loss"}, rel=rounding
    )


@pytest.mark.parametrize("engine", soak_but(["shuffle"], ["local", "shuffle"]))
def test_a_sum_and_its_count(orders: DataFrame, engine: str) -> None:
    trained = replace(TRAINER, step=where_returned, engine=engine).fit(orders)
    losses = [told["loss"] for told in plain_loop(orders, where_returned)]
    assert trained.history.losses == pytest.approx(losses, rel=1e-4)


def test_metrics_by_output(orders: DataFrame) -> None:
    metrics = [
        sparkdl.MetricOf("mse", label="amount", output="amount"),
        sparkdl.MetricOf("accuracy", label="returned", output="returned"),
    ]
    validation = sparkdl.Validation(orders, metrics=metrics, best="returned/accuracy")
    trained = replace(TRAINER, validation=validation).fit(orders)
    told = trained.history.validations[-1]["metrics"]
    assert list(told) == ["loss", "amount/mse", "returned/accuracy"]
    assert trained.evaluate(orders, metrics=metrics) == pytest.approx(told, rel=1e-5)
    named = plain_loop(orders, both, rounds=5)[-1]  # by the weights after the fourth update
    assert told["amount/mse"] == pytest.approx(named["amount"], rel=1e-4)
    assert told["loss"] == pytest.approx(named["loss"], rel=1e-4)
    with pytest.raises(sparkdl.ParameterError, match="metrics need one label; the model has 2"):
        trained.evaluate(orders, metrics=["mse"])
    wrong = [sparkdl.MetricOf("mse", label="amuont", output="amount")]
    with pytest.raises(sparkdl.ParameterError, match=r'no label\. Did you mean "amount"'):
        replace(TRAINER, validation=sparkdl.Validation(orders, metrics=wrong)).fit(orders)


@pytest.mark.gang
def test_metrics_are_of_the_output(orders: DataFrame) -> None:
    """Ranks have unequal numbers of validation batches, and all units run equally often."""
    some = orders.where("amount > 0.3 OR returned > 0")
    trainer = replace(
        TRAINER,
        step=amount_alone,
        label="amount",
        output="amount",
        engine="gang",
        strategy="fsdp",
        validation=sparkdl.Validation(some, metrics=["mse"], batch_size=3),
    )
    trained = trainer.fit(orders)
    (told,) = [record["metrics"] for record in trained.history.validations][-1:]
    assert told["loss"] == pytest.approx(told["mse"], rel=1e-5)
    assert trained.evaluate(some, metrics=["mse"]) == pytest.approx(told, rel=1e-4)


def amount_alone(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = module(batch["x"])
    return F.mse_loss(hidden["amount"], batch["amount"]) + 0.0 * hidden["returned"].sum()


def in_turns(module: Any, batch: dict[str, torch.Tensor]) -> Any:
    found = module(batch["x"])
    return [found["amount"].mean(), found["returned"].mean()]


def goes_back(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = module(batch["x"])["amount"].mean()
    loss.backward(retain_graph=True)
    return loss


def updates(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.optim.SGD(module.heads.parameters(), lr=0.1).step()
    return module(batch["x"])["amount"].mean()


def of_all_rows(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(batch["x"])["amount"].std()


def misnamed(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(batch["features"])["amount"].mean()


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (in_turns, "need a loop of their own in sparkdl.gang.run: see examples/two_optimizers.py"),
        (goes_back, "step runs backward, which belongs to the engine"),
        (updates, 'step changes "heads.weight", and updates belong to the engine. A step'),
        (of_all_rows, "step=sparkdl.PerReplica(step)"),
        (misnamed, 'step fails on the first rows ("x" [2, 2]; float32): KeyError'),
        (
            misnamed,
            'It is called as step(module, batch), and the batch has "x", "amount", "returned".',
        ),
    ],
)
def test_a_step_that_cannot_be_exact(orders: DataFrame, step: Any, text: str) -> None:
    with pytest.raises(sparkdl.ModelError) as caught:
        replace(TRAINER, step=step).fit(orders)
    assert text in str(caught.value)


def among_all(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The variance over the global batch, and an error of each row."""
    found = module(batch["x"])["amount"]
    everything, first = sparkdl.all_rows(found)
    assert torch.equal(everything[first : first + len(found)], found)
    return ((found - everything.mean()) ** 2 - (found - batch["amount"]) ** 3).mean()


@pytest.mark.gang
@pytest.mark.parametrize("strategy", soak_but(["fsdp"], ["ddp", "fsdp"]))
def test_rows_of_all_ranks(orders: DataFrame, strategy: str) -> None:
    """Ranks have unequal numbers of rows; in the last batch, one of them has none."""
    some = orders.where("amount > 0.1").cache()
    count = some.count()
    assert count % 2
    trainer = replace(TRAINER, step=sparkdl.PerReplica(among_all), engine="gang", strategy=strategy)
    trained = replace(trainer, batch_size=count).fit(some)
    expected = [told["loss"] for told in plain_loop(some, among_all)]
    assert trained.history.losses == pytest.approx(expected, rel=1e-4)
    if strategy == "ddp":
        losses = replace(trainer, batch_size=count - 1).fit(some).history.losses
        assert losses == pytest.approx(losses, nan_ok=False)
    some.unpersist()


def test_each_replica_alone(orders: DataFrame) -> None:
    step = sparkdl.PerReplica(of_all_rows)
    assert replace(TRAINER, step=step).fit(orders).history.losses[-1] > 0
