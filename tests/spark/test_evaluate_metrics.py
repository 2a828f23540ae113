"""``trained.evaluate`` with metrics that are no plain means: states of partitions merge."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from launch import in_turn, soak_but
from lazily import Lazily
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl import ParameterError

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])
sk, tm = Lazily("sklearn.metrics"), Lazily("torchmetrics")


def fitted(data: Any, outputs: int, label: str, loss: Any) -> sparkdl.TrainedModel:
    return sparkdl.Trainer(
        model=partial(nn.Linear, 2, outputs),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        features="x",
        label=label,
        batch_size=20,
        engine="local",
        stop=sparkdl.max_iteration(2),
    ).fit(data)


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    """40 rows in 4 partitions: ``x`` two floats with many ties, ``c`` of four classes, ``b`` 0 or 1."""
    return spark.range(0, 40, 1, 4).selectExpr(
        "id as i",
        "array(float(id % 7), float(id % 3)) as x",
        "int(id * 7 % 4) as c",
        "float(id % 5 > 2) as b",
        "array(float(id % 2), float(id % 3), 0f, 1f) as worth",
    )


@pytest.fixture(scope="module")
def classes(table: Any) -> sparkdl.TrainedModel:
    return fitted(table, 4, "c", nn.CrossEntropyLoss())


@dataclass
class Seen:
    """A state of a class that executors know by value only."""

    rows: list[float]


class Order(sparkdl.Metric):
    """How many rows have a first output that is larger than that of the row before."""

    name = "order"

    def start(self) -> Seen:
        return Seen([])

    def update(self, state: Seen, output: torch.Tensor, target: torch.Tensor) -> Seen:
        return Seen(state.rows + output[:, 0].tolist())

    def merge(self, one: Seen, other: Seen) -> Seen:
        return Seen(one.rows + other.rows)

    def value(self, state: Seen) -> float:
        return float((np.diff(state.rows) > 0).sum())


def as_records(table: Any) -> Any:
    return table.rdd.map(lambda row: (row.x, row.c))


@pytest.mark.parametrize(("of", "partitions"), in_turn([lambda table: table, as_records], [2, 3]))
def test_any_number_of_partitions(
    table: Any, classes: Any, of: Callable[[Any], Any], partitions: int
) -> None:
    rows = table.collect()
    scores = classes.module(torch.tensor([row.x for row in rows])).detach()
    target = torch.tensor([row.c for row in rows])
    data = table.sparkSession.createDataFrame(
        table.sparkSession.sparkContext.parallelize(rows, partitions), table.schema
    )
    metrics = [
        "top@2",
        "ndcg@3",
        Order(),
        ("f1", tm.F1Score("multiclass", num_classes=4, average="macro")),
        {"auroc": tm.AUROC("multiclass", num_classes=4)},
    ]
    found = classes.evaluate(of(data), metrics, batch_size=7)
    top2 = scores.sort(dim=1, descending=True, stable=True).indices[:, :2]
    expected = {
        "loss": float(nn.functional.cross_entropy(scores, target)),
        "top@2": float((top2 == target[:, None]).any(dim=1).double().mean()),
        "ndcg@3": sk.ndcg_score(np.eye(4)[target], scores.numpy(), k=3),
        "order": float((np.diff(scores[:, 0]) > 0).sum()),
        "f1": sk.f1_score(target, scores.argmax(dim=1), average="macro"),
        "auroc": sk.roc_auc_score(target, scores.softmax(dim=1), multi_class="ovr"),
    }
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("outputs", soak_but([2], [1, 2]))
def test_auc(table: Any, outputs: int) -> None:
    loss = nn.BCEWithLogitsLoss() if outputs == 1 else nn.CrossEntropyLoss()
    data = table.selectExpr("x", "array(b) as y" if outputs == 1 else "int(b) as y")
    model = fitted(data, outputs, "y", loss)
    rows = table.collect()
    output = model.module(torch.tensor([row.x for row in rows])).detach()
    score = output[:, 0] if outputs == 1 else output[:, 1].double() - output[:, 0].double()
    expected = sk.roc_auc_score([row.b for row in rows], score)
    for partitions in (2, 3):
        found = model.evaluate(data.repartition(partitions), ["auc", "accuracy"], batch_size=4)
        assert found["auc"] == pytest.approx(expected, abs=1e-6)
        assert list(found) == ["loss", "auc", "accuracy"]


def test_relevances_as_the_label(table: Any) -> None:
    model = fitted(table, 4, "worth", nn.MSELoss())
    rows = table.collect()
    scores = model.module(torch.tensor([row.x for row in rows])).detach().numpy()
    worth = np.array([row.worth for row in rows])
    found = model.evaluate(table, ["ndcg@2", "hit_ratio@1"])
    assert found["ndcg@2"] == pytest.approx(sk.ndcg_score(worth, scores, k=2), abs=1e-6)
    hits = worth[np.arange(len(rows)), scores.argmax(axis=1)] > 0
    assert found["hit_ratio@1"] == pytest.approx(hits.mean())


@pytest.mark.parametrize("of", [lambda table: table, as_records], ids=["DataFrame", "RDD"])
def test_a_metric_that_does_not_fit_is_a_mistake_not_a_fault(
    table: Any, classes: Any, of: Callable[[Any], Any]
) -> None:
    with pytest.raises(ParameterError) as caught:
        classes.evaluate(of(table), ["accuracy", "top5"])
    assert str(caught.value) == (
        'metric "top5" failed: top-5 of 4 classes: k is larger than the number of classes. The '
        "output is (10, 4) float32, the label (10,) int64."
    )


def test_metrics_that_cannot_be_are_refused_before_any_job(
    table: Any, classes: Any, num_jobs: Callable[[], int]
) -> None:
    before = num_jobs()
    with pytest.raises(ParameterError, match=r"PearsonCorrCoef.: its states of two parts"):
        classes.evaluate(table, [tm.PearsonCorrCoef()])
    with pytest.raises(ParameterError, match=r'Did you mean "ndcg"\? .*ndcg@k'):
        classes.evaluate(table, ["ndcg_5"])
    assert num_jobs() == before


def test_matrices_and_curves_of_validations(table: Any, tmp_path: Any) -> None:
    """They are in the history, in that of a checkpoint too, and no figure that can be the best."""
    several = tm.F1Score("multiclass", num_classes=4, average=None)
    metrics = ["f1_macro", "confusion_matrix", ("each", several)]
    trainer = sparkdl.Trainer(
        model=partial(nn.Linear, 2, 4),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        features="x",
        label="c",
        engine="local",
        checkpoint=sparkdl.Checkpoint(tmp_path / "run"),
        validation=sparkdl.Validation(table, metrics, best="f1_macro"),
        stop=sparkdl.max_epoch(2),
    )
    trained = trainer.fit(table)
    found = trained.evaluate(table, metrics)
    last = trained.history.validations[-1]
    assert last["metrics"] == pytest.approx({name: found[name] for name in ("loss", "f1_macro")})
    assert last["arrays"] == {name: found[name] for name in ("confusion_matrix", "each")}
    assert np.sum(found["confusion_matrix"]) == 40
    trained.history.save(tmp_path / "history.json")
    longer = replace(trainer, stop=sparkdl.max_epoch(3)).fit(table, resume="latest").history
    for history in (sparkdl.History.load(tmp_path / "history.json"), longer):
        assert history.validations[:2] == trained.history.validations
    for name in ("confusion_matrix", "each"):
        with pytest.raises(ParameterError, match=f'best="{name}"'):  # the second one during the fit
            _with_best(trainer, name).fit(table)


def _with_best(trainer: sparkdl.Trainer, name: str) -> sparkdl.Trainer:
    assert trainer.validation is not None
    return replace(trainer, validation=replace(trainer.validation, best=name), checkpoint=None)


def test_the_threshold_of_a_classifier(table: Any) -> None:
    """Above it are the rows that make the metric highest, for either form of output."""
    for outputs, loss in ((1, nn.BCEWithLogitsLoss()), (2, nn.CrossEntropyLoss())):
        data = table.selectExpr("x", "array(b) as y" if outputs == 1 else "int(b) as y", "b")
        model = fitted(data, outputs, "y", loss)
        best = sparkdl.tune.threshold(model, data)
        rows = model.transform(data, postprocess=best).collect()
        truth = [row.b for row in rows]
        assert sk.f1_score(truth, [row.prediction for row in rows]) == pytest.approx(best.value)
        scores = [
            float(row.prediction) for row in model.transform(data, postprocess=_sure).collect()
        ]
        values = [sk.f1_score(truth, np.array(scores) >= cut) for cut in scores]
        assert best.value == pytest.approx(max(values))
        of_doubles = data.selectExpr("x", "b * 1.0D AS y")  # as pyspark.ml has its labels
        assert outputs == 1 or sparkdl.tune.threshold(model, of_doubles) == best
        dear = sparkdl.tune.threshold(model, data, lambda tp, fp, fn, tn: -(50 * fp + fn))
        assert dear.value >= -truth.count(1.0)
        assert dear.threshold >= best.threshold
    with pytest.raises(ParameterError, match="give one of f1, accuracy"):
        sparkdl.tune.threshold(model, data, "f2")


def _sure(output: torch.Tensor) -> torch.Tensor:
    return output[:, 0].sigmoid() if output.shape[1] == 1 else output.softmax(1)[:, 1]
