"""Trained models in MLflow's format: each flavor loads, and gives the module's own predictions."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import summary_runs as runs
import torch
from lazily import Lazily
from torch import nn
from trained import trained_model

import sparkdl
import sparkdl.mlflow
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Padding
from sparkdl.infer.outputs import Output

mlflow = Lazily("mlflow")
pyfunc = Lazily("mlflow.pyfunc")
pytorch = Lazily("mlflow.pytorch")
pytestmark = pytest.mark.usefixtures("mlflow_store")


class Both(nn.Module):
    """A model of a matrix, a whole number, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.names = nn.Embedding(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, matrix: torch.Tensor, word: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.last(matrix.mean(1) + self.names(word) * x[:, None])


def a_model() -> sparkdl.TrainedModel:
    torch.manual_seed(0)
    kinds = {"m": ("float32", (2, 4)), "w": ("int64", ()), "x": ("float32", ()), "y": ("int64", ())}
    return trained_model(
        Both(),
        model=Both,
        loss=nn.CrossEntropyLoss(),
        features=("m", "w", "x"),
        label=("y",),
        fields=tuple(Field(name, *kind) for name, kind in kinds.items()),
        output=Output((2,), "float32"),
    )


ROWS = pd.DataFrame(
    {
        "y": [1] * 7,
        "m": list(np.random.default_rng(0).normal(size=(7, 2, 4))),
        "w": [0, 1, 2, 0, 1, 2, 0],
        "x": np.linspace(-1, 1, 7),
    }
)


def wanted(trained: sparkdl.TrainedModel, rows: pd.DataFrame = ROWS) -> np.ndarray:
    matrix = torch.tensor(np.stack(list(rows["m"])), dtype=torch.float32)
    word, x = torch.tensor(rows["w"].to_numpy()), torch.tensor(rows["x"].to_numpy()).float()
    with torch.no_grad():
        return trained.module(matrix, word, x).numpy()


def test_each_flavor_gives_the_same_predictions() -> None:
    trained = a_model()
    with mlflow.start_run() as run:
        info = sparkdl.mlflow.log_model(trained, input_example=ROWS)
    assert set(info.flavors) == {"sparkdl", "pytorch", "python_function"}
    assert info.run_id == run.info.run_id
    assert info.signature.inputs.input_names() == ["m", "w", "x"]
    of_rows = pyfunc.load_model(info.model_uri).predict(ROWS)
    np.testing.assert_allclose(of_rows, wanted(trained), rtol=1e-6)
    module = pytorch.load_model(info.model_uri)
    assert torch.equal(module.last.weight, trained.module.last.weight)
    loaded = sparkdl.mlflow.load_model(info.model_uri)
    assert torch.equal(loaded.module.names.weight, trained.module.names.weight)
    assert loaded.features == trained.features
    stored = mlflow.models.Model.load(info.model_uri).load_input_example()
    assert list(stored.columns) == ["m", "w", "x"]
    assert len(stored) == 5


def test_the_signature_follows_from_the_training() -> None:
    """Rows of double and of whole numbers are what a model of float32 is given."""
    trained = a_model()
    with mlflow.start_run():
        info = sparkdl.mlflow.log_model(trained, registered_model_name="both", alias="champion")
    assert "Array(Array(double))" in str(info.signature.inputs)
    assert result_type(info) == "array<float>"
    predict = pyfunc.load_model("models:/both@champion").predict
    np.testing.assert_allclose(predict(ROWS), wanted(trained), rtol=1e-6)
    assert sparkdl.mlflow.load_model("models:/both/1").num_features == 3


class NoZeros(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.any():
            raise ValueError("nothing is there")
        return super().forward(x)


def test_a_model_that_takes_no_zeros_is_saved_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = trained_model(NoZeros(3, 2), model=partial(NoZeros, 3, 2))
    sparkdl.mlflow.save_model(trained, tmp_path / "model")
    assert mlflow.models.Model.load(tmp_path / "model").signature is None
    (told,) = [text for text in caplog.messages if "without a signature" in text]
    assert "nothing is there" in told
    rows = pd.DataFrame({"x": [np.zeros(3)]})
    with pytest.raises(sparkdl.ModelError, match="nothing is there"):
        sparkdl.mlflow.save_model(trained, tmp_path / "other", input_example=rows)


def result_type(info: Any) -> str:
    """Return the type that ``spark_udf`` finds by itself."""
    return pyfunc._infer_spark_udf_return_type(info.signature.outputs).simpleString()


class Best(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(3, 9)

    def forward(self, x: torch.Tensor) -> Any:
        values, items = self.scores(x).topk(2)
        return {"score": values, "item": items}


def test_several_results_are_a_struct() -> None:
    trained = trained_model(Best(), model=Best)
    with mlflow.start_run():
        info = sparkdl.mlflow.log_model(trained)
    assert result_type(info) == "struct<score:array<float>,item:array<bigint>>"
    rows = torch.randn(5, 3)
    found = pyfunc.load_model(info.model_uri).predict(pd.DataFrame({"x": list(rows.numpy())}))
    with torch.no_grad():
        expected = trained.module(rows)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.stack(list(found[name])), values.numpy())


def test_rows_of_any_length(tmp_path: Path) -> None:
    module = nn.EmbeddingBag(9, 2)
    trained = trained_model(
        module,
        model=partial(nn.EmbeddingBag, 9, 2),
        features=("ids",),
        columns={"ids": sparkdl.Sequence()},
        fields=(Field("ids", "int64", (), Padding()),),
    )
    sparkdl.mlflow.save_model(trained, tmp_path / "model")
    model = pyfunc.load_model(str(tmp_path / "model"))
    assert "Array(long)" in str(model.metadata.signature.inputs)
    found = model.predict(pd.DataFrame({"ids": [[1, 2], [3], [4, 5, 6]]}))
    assert found.shape == (3, 2)
    with torch.no_grad():
        both = module(torch.tensor([[1, 2], [4, 0]]))
    np.testing.assert_allclose(model.predict(pd.DataFrame({"ids": [[1, 2]]}))[0], both[0])
    with pytest.raises(FileExistsError, match="is not empty: give a new folder"):
        sparkdl.mlflow.save_model(trained, tmp_path / "model")


def test_modules_travel_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_of_mlflow.py").write_text(
        "from torch import nn\nclass Own(nn.Linear):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_of_mlflow

    made = partial(own_of_mlflow.Own, 2, 1)
    fields = (Field("x", "float32", (2,)),)
    trained = trained_model(made(), model=made, fields=fields, output=Output((1,), "float32"))
    place = tmp_path / "model"
    sparkdl.mlflow.save_model(trained, place, code_paths=[tmp_path / "own_of_mlflow.py"])
    del sys.modules["own_of_mlflow"]
    sys.path.remove(str(tmp_path))
    (tmp_path / "own_of_mlflow.py").unlink()
    predict = pyfunc.load_model(str(place)).predict
    given = np.array([[1.0, 2.0], [3.0, 4.0]])
    with torch.no_grad():
        output = trained.module(torch.tensor(given).float()).numpy()
    np.testing.assert_allclose(predict(pd.DataFrame({"x": list(given)})), output, rtol=1e-6)


def test_mistakes_are_told() -> None:
    trained = a_model()
    with pytest.raises(sparkdl.ParameterError, match="a DataFrame with the columns m, w, x"):
        sparkdl.mlflow.save_model(trained, "unused", input_example=ROWS[["m"]])
    with pytest.raises(sparkdl.DataError, match="the table has no column w, x"):
        sparkdl.mlflow.PyFunc(trained).predict(ROWS[["m"]])
    for log in (sparkdl.mlflow.log_model, sparkdl.summaries.MLflow().log_model):
        for other in (trained.module, None):
            with pytest.raises(
                sparkdl.ParameterError, match=r"takes what Trainer\.fit returns, not"
            ):
                log(other)
    assert mlflow.active_run() is None


def values(run_id: str, name: str) -> list[int]:
    return [m.step for m in mlflow.MlflowClient().get_metric_history(run_id, name)]


def test_a_store_that_fails_costs_no_fit(
    mlflow_store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be logged meanwhile is logged when the store works again."""
    monkeypatch.setattr(sparkdl.summaries.mlflow_run, "PAUSE_SECONDS", 0.0)
    callback = sparkdl.summaries.MLflow(every=sparkdl.every(1))
    trainer, states = runs.a_trainer(), runs.states()
    callback.on_fit_start(trainer, states[0])
    (folder,) = (mlflow_store / "mlruns").glob(f"*/{callback.run_id}")
    for state in states[1:]:
        if state.iteration == 3:
            folder.rename(mlflow_store / "away")
        if state.iteration == 6:
            (mlflow_store / "away").rename(folder)
            callback._run._next_try = 0.0
        callback.on_iteration_end(trainer, state)
    assert "the training goes on, but MLflow could not log metrics: " in caplog.text
    assert values(callback.run_id, "loss") == [*range(1, 9)]
    folder.rename(mlflow_store / "away")
    callback.on_fit_end(trainer, states[-1])
    assert "MLflow could not log its history" in caplog.text
    assert "MLflow could not log the end of the run" in caplog.text
    (mlflow_store / "away").rename(folder)


def test_the_model_is_logged_after_the_fit() -> None:
    callback = sparkdl.summaries.MLflow(log_models=True)
    trained, trainer, states = a_model(), runs.a_trainer(), runs.states()
    runs.play([callback], states)
    assert mlflow.active_run() is not None
    callback.on_result(trainer, trained)
    assert mlflow.active_run() is None
    run = mlflow.MlflowClient().get_run(callback.run_id)
    assert run.info.status == "FINISHED"
    (output,) = run.outputs.model_outputs
    loaded = sparkdl.mlflow.load_model(f"models:/{output.model_id}")
    assert torch.equal(loaded.module.last.weight, trained.module.last.weight)
    names = [file.path for file in mlflow.MlflowClient().list_artifacts(callback.run_id)]
    assert sorted(names) == ["history.json", "report.html"]


def test_fits_of_a_search_are_child_runs() -> None:
    """The first of an active run is logged to it; a second one, and those of threads, are inside."""
    with mlflow.start_run() as outer:
        first, second, third = (sparkdl.summaries.MLflow(nested=True) for _ in range(3))
        runs.play([first], runs.states())
        runs.play([second], runs.states())
        thread = threading.Thread(target=runs.play, args=([third], runs.states()))
        thread.start()
        thread.join()
    assert first.run_id == outer.info.run_id
    client = mlflow.MlflowClient()
    for inner in (client.get_run(second.run_id), client.get_run(third.run_id)):
        assert inner.info.run_id != first.run_id
        assert inner.data.tags["mlflow.parentRunId"] == first.run_id
        assert inner.info.status == "FINISHED"
        assert "None" not in inner.data.params.values()


def test_the_data_set_is_logged() -> None:
    callback, trained = sparkdl.summaries.MLflow(), a_model()
    training = [["rows", "1,200"], ["digest of the rows", "00ff"]]
    columns = [["column", "role", "values"], ["m", "feature", "float32[2, 4]"]]
    trained.history.note_facts({"Training": training, "Columns": columns})
    runs.play([callback], runs.states())
    callback.on_result(runs.a_trainer(), trained)
    (logged,) = mlflow.MlflowClient().get_run(callback.run_id).inputs.dataset_inputs
    assert (logged.dataset.digest, logged.tags[0].value) == ("00ff", "training")
    assert logged.dataset.profile == '{"num_rows": 1200}'
    assert "float32[2, 4] (feature)" in logged.dataset.schema


def test_autologging_is_of_every_fit() -> None:
    from sparkdl.loop.callbacks import added_callbacks

    sparkdl.mlflow.autolog()
    try:
        (added,) = added_callbacks(())
        assert isinstance(added, sparkdl.summaries.MLflow)
        assert list(added_callbacks([sparkdl.summaries.MLflow()])) == []
    finally:
        sparkdl.mlflow.autolog(disable=True)
    assert list(added_callbacks(())) == []
