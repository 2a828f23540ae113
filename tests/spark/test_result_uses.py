"""What a result is used for elsewhere: another forward, evaluators of pyspark.ml, and URIs."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark import cloudpickle
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from torch import nn

import sparkdl

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Matching(nn.Module):
    """A model of users and items."""

    def __init__(self, users: int, items: int, dim: int = 4) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim), nn.Embedding(items, dim)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.users(user) * self.items(item)).sum(-1)


class TopItems(nn.Module):
    """The best two items of a user, out of all."""

    def __init__(self, trained: Matching) -> None:
        super().__init__()
        self.trained = trained

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        scores = self.trained.users(user) @ self.trained.items.weight.T
        return scores.topk(2).indices


@pytest.fixture(scope="module")
def matched(spark: Any) -> tuple[sparkdl.TrainedModel, Any]:
    pairs = spark.range(40).selectExpr(
        "id % 8 AS user", "id % 5 AS item", "float(id % 8 = id % 5) AS label"
    )
    trainer = sparkdl.Trainer(
        model=partial(Matching, 8, items=5),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        features=["user", "item"],
        batch_size=20,
        engine="local",
        replicas=1,
        stop=sparkdl.max_epoch(2),
    )
    return trainer.fit(pairs), pairs


def test_another_forward_shares_the_weights(matched: Any, tmp_path: Path) -> None:
    trained, pairs = matched
    top = trained.with_module(TopItems, features=["user"])
    assert top.module.trained is trained.module
    assert (top.features, top.label, top.loss) == (("user",), ("label",), None)
    users = pairs.select("user").distinct()
    scored = top.transform(users)
    assert scored.schema["prediction"].dataType.simpleString() == "array<bigint>"
    scores = trained.module.users.weight @ trained.module.items.weight.T
    wanted = scores.topk(2).indices.tolist()
    assert all(row.prediction == wanted[row.user] for row in scored.collect())
    by_hand = trained.with_module(TopItems(trained.module), features={"user": "user"})
    assert by_hand.transform(users).collect() == scored.collect()
    with pytest.raises(
        sparkdl.ParameterError, match=r'"users" is no column of the training, which'
    ):
        trained.with_module(TopItems, features="users")
    with pytest.raises(sparkdl.ModelError, match=r"must return a torch\.nn\.Module"):
        trained.with_module(lambda module: "top")


def test_another_forward_is_saved_by_name(
    matched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class, the model and its arguments have names: a process loads it without a pickle."""
    trained, pairs = matched
    folder = trained.with_module(TopItems, features=["user"]).save(tmp_path / "top")
    assert not (tmp_path / "top" / "recipe.pkl").exists()
    loaded = sparkdl.load(folder)
    assert isinstance(loaded.module.trained, Matching)
    users = pairs.select("user").distinct()
    before = trained.with_module(TopItems, features=["user"]).transform(users).collect()
    assert loaded.transform(users).collect() == before


def classifier(outputs: int, spark: Any) -> tuple[sparkdl.TrainedModel, Any]:
    data = spark.range(64).selectExpr("array(rand(1), rand(2)) AS x", "id % 2 AS label")
    torch.manual_seed(0)
    trainer = sparkdl.Trainer(
        model=partial(nn.Linear, 2, outputs),
        loss=nn.CrossEntropyLoss() if outputs > 1 else nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        features="x",
        label="label" if outputs > 1 else "y",
        engine="local",
        replicas=1,
        stop=sparkdl.max_epoch(1),
    )
    data = data.selectExpr("*", "array(float(label)) AS y", "double(label) AS number")
    return trainer.fit(data), data


def test_evaluators_of_spark_take_the_predictions(spark: Any) -> None:
    trained, data = classifier(2, spark)
    scored = trained.transform(data, prediction_col="raw", ml_types=True)
    assert scored.schema["raw"].dataType.simpleString() == "vector"
    plain = trained.transform(data, prediction_col="raw").collect()
    assert [list(row.raw) for row in scored.collect()] == [row.raw for row in plain]
    auc = BinaryClassificationEvaluator(rawPredictionCol="raw").evaluate(scored)
    assert auc == pytest.approx(
        trained.evaluate(data, metrics=["auc"], output=lambda out: out[:, 1])["auc"], abs=1e-6
    )
    to_class = partial(torch.argmax, dim=1)
    named = trained.transform(data, postprocess=to_class, ml_types=True)
    assert named.schema["prediction"].dataType.simpleString() == "double"
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(named)
    assert accuracy == pytest.approx(trained.evaluate(data, metrics=["accuracy"])["accuracy"])

    regressor, data = classifier(1, spark)
    scored = regressor.transform(data, ml_types=True)
    assert scored.schema["prediction"].dataType.simpleString() == "double"
    mse = RegressionEvaluator(labelCol="number", metricName="mse").evaluate(scored)
    assert mse == pytest.approx(regressor.evaluate(data)["loss"], rel=1e-5)


def test_a_matrix_is_no_vector(spark: Any) -> None:
    trained, data = classifier(2, spark)
    with pytest.raises(
        sparkdl.ParameterError, match=r"shape \[2, 1\], and pyspark\.ml has numbers"
    ):
        trained.transform(data, postprocess=lambda out: out[:, :, None], ml_types=True)


@pytest.mark.parametrize("scheme", ["viewfs", "memory", "file"])
def test_a_model_at_a_uri(
    spark: Any, matched: Any, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that Hadoop reaches alone, one that fsspec reaches alone, and a path of this machine.

    The temporary directory may have any name.
    """
    (tmp_path / "ein \u00fcbler %20 ordner").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "ein \u00fcbler %20 ordner"))
    trained, pairs = matched
    (tmp_path / "models").mkdir()
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    conf.set("fs.viewfs.mounttable.here.link./models", (tmp_path / "models").as_uri())
    uri = {
        "viewfs": "viewfs://here/models/one",
        "memory": f"memory://{tmp_path.name}/one",
        "file": f"{tmp_path.as_uri()}/models/one",
    }[scheme]
    place = trained.save(uri)
    assert str(place) == (str(tmp_path / "models/one") if scheme == "file" else uri)
    loaded = sparkdl.load(uri)
    assert loaded.transform(pairs).collect() == trained.transform(pairs).collect()
    assert loaded.history.to_json_bytes() == trained.history.to_json_bytes()
    with pytest.raises(FileExistsError, match="already holds a model"):
        trained.save(uri)
    with torch.no_grad():
        loaded.module.users.weight.zero_()
    loaded.save(uri, overwrite=True)
    assert not sparkdl.load(uri).module.users.weight.any()
    if scheme == "viewfs":
        (tmp_path / "models/one/.model.safetensors.crc").unlink()  # of Hadoop's local file system
        (tmp_path / "models/one/model.safetensors").write_bytes(b"no weights")
        with pytest.raises(
            sparkdl.ModelError, match=r"viewfs://here/models/one/model\.safetensors cannot be read"
        ):
            sparkdl.load(uri)


def test_a_history_as_a_table(matched: Any) -> None:
    history = matched[0].history
    table = history.to_pandas()
    assert table["loss"].tolist() == history.losses
    assert table["epoch"].tolist() == [1, 1, 2, 2]
    assert table["gradient_norm"].dtype == np.float64
    assert "timings/forward" in table.columns
    assert len(sparkdl.History().to_pandas()) == 0
