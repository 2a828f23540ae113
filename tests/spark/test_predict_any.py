"""Predictions with models that were never trained here, in every way that Spark asks for them."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import innards
import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import small_text
import torch
from launch import soak_but
from lazily import Lazily
from scored_models import (
    Boxes,
    Columns,
    Elements,
    Ends,
    Fails,
    Plus,
    Several,
    Tokenized,
    late,
    word_lengths,
)
from torch import nn

import sparkdl
from sparkdl.checkpoint.files import Folder
from sparkdl.compat import ARROW_FUNCTIONS
from sparkdl.data.arrow_tasks import partition_of
from sparkdl.data.fields import Field
from sparkdl.infer import written
from sparkdl.infer.outputs import Output

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]
transformers = Lazily("transformers")
ROWS = 60
POINTS = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)
LENGTHS = [1 + 7 * number % 11 for number in range(ROWS)]
TEXTS = [
    " ".join(itertools.islice(itertools.cycle(small_text.WORDS.split()[n % 7 :]), LENGTHS[n]))
    for n in range(ROWS)
]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


NET = net().eval()


@pytest.fixture(scope="module")
def points(spark: SparkSession) -> Iterator[DataFrame]:
    rows = [(number, row.tolist()) for number, row in enumerate(POINTS)]
    found = spark.createDataFrame(rows, "number int, x array<float>").repartition(2).cache()
    yield found
    found.unpersist()


@pytest.fixture(scope="module")
def texts(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(list(enumerate(TEXTS)), "number int, text string").repartition(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_text.saved(tmp_path_factory.mktemp("bert"))


def values(scored: DataFrame, name: str = "prediction") -> list[Any]:
    return [row[name] for row in sorted(scored.collect(), key=lambda row: row.number)]


def same(found: list[Any], expected: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(torch.tensor(found), expected.detach(), **tolerance)


def file_of(write: Callable[[Any], Any], name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write(folder / name)
        return folder / name

    return make


def exported(path: Path | None = None, rows: int = 4, **shapes: Any) -> Any:
    program = torch.export.export(NET, (torch.ones(rows, 3),), **shapes)
    return program if path is None else torch.export.save(program, path)


ANY_ROWS: dict[str, Any] = {"dynamic_shapes": ({0: torch.export.Dim("rows")},)}
MODELS: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "a module": lambda folder: (NET, {}),
    "a module that has a tokenizer": lambda folder: (Tokenized(NET), {}),
    "a TorchScript module": lambda folder: (torch.jit.script(NET), {}),
    "a TorchScript file": lambda folder: (
        file_of(lambda path: torch.jit.trace(NET, torch.ones(2, 3)).save(path), "net.pt")(folder),
        {},
    ),
    "an exported program": lambda folder: (exported(**ANY_ROWS), {}),
    "a file of one": lambda folder: (
        file_of(lambda path: exported(path, **ANY_ROWS), "net.pt2")(folder),
        {},
    ),
    "one for 7 rows": lambda folder: (exported(rows=7), {}),
    "a function and a state_dict": lambda folder: (net, {"weights": NET.state_dict()}),
    "weights of data parallel": lambda folder: (
        net,
        {"weights": {f"module.{name}": value for name, value in NET.state_dict().items()}},
    ),
    "a safetensors file": lambda folder: (
        net,
        {
            "weights": file_of(
                lambda path: safetensors.torch.save_file(NET.state_dict(), path), "n.safetensors"
            )(folder)
        },
    ),
    "a file of torch.save": lambda folder: (
        net,
        {"weights": file_of(lambda path: torch.save(NET.state_dict(), path), "n.pt")(folder)},
    ),
}


IN_CI = [
    *("a module", "a TorchScript file", "a file of one", "one for 7 rows"),
    *("weights of data parallel", "a safetensors file", "a module that has a tokenizer"),
]


@pytest.mark.parametrize("kind", soak_but(IN_CI, MODELS))
def test_any_model_predicts_as_in_torch(points: DataFrame, tmp_path: Path, kind: str) -> None:
    model, arguments = MODELS[kind](tmp_path)
    scored = sparkdl.predict(points, model, "x", batch_size=16, **arguments)
    assert scored.columns == ["number", "x", "prediction"]
    assert scored.schema["prediction"].dataType.simpleString() == "array<float>"
    same(values(scored), NET(torch.from_numpy(POINTS)))


def trained_on_points() -> sparkdl.TrainedModel:
    return sparkdl.TrainedModel(
        module=NET,
        model=NET,
        loss=None,
        features=("x",),
        label=("number",),
        fields=(Field("x", "float32", (3,)), Field("number", "int64", ())),
        num_features=1,
        float_dtype="float32",
        output=Output((2,), "float32"),
        history=sparkdl.History(),
    )


def test_a_trained_model_brings_its_columns(points: DataFrame) -> None:
    trained = trained_on_points()
    expected = values(trained.transform(points))
    assert values(sparkdl.predict(points, trained)) == expected
    twice = sparkdl.predict(points, trained, outputs={"twice": lambda output: 2 * output})
    same(values(twice, "twice"), 2 * torch.tensor(expected))
    several = sparkdl.predict(points, trained.with_module(lambda _: Several()))
    assert several.columns == ["number", "x", "total", "doubled"]


@pytest.mark.parametrize(
    ("model", "outputs", "columns"),
    [
        (Several(), None, {"total": "float", "doubled": "array<float>"}),
        (Several(), "total", {"prediction": "float"}),
        (Several(), ["total", "doubled"], {"total": "float", "doubled": "array<float>"}),
        (
            Several(),
            {"t": "total", "first": lambda found: found["doubled"][:, 0].long()},
            {"t": "float", "first": "bigint"},
        ),
        (Ends(), None, {"low": "float", "high": "float"}),
        (Ends(), 1, {"prediction": "float"}),
    ],
    ids=["mapping", "key", "names", "functions", "named tuple", "number"],
)
def test_outputs_become_columns(
    points: DataFrame, model: nn.Module, outputs: Any, columns: dict[str, str]
) -> None:
    scored = sparkdl.predict(points, model, "x", outputs=outputs)
    added = scored.schema.fields[2:]
    assert {field.name: field.dataType.simpleString() for field in added} == columns
    rows = torch.from_numpy(POINTS)
    whole = {"total": rows.sum(1), "t": rows.sum(1), "doubled": 2 * rows}
    whole |= {"low": rows.amin(1), "high": rows.amax(1), "first": (2 * rows[:, 0]).long()}
    whole["prediction"] = whole["total" if isinstance(model, Several) else "high"]
    for name in columns:
        same(values(scored, name), whole[name])


def test_a_varying_number_of_results_a_row(spark: SparkSession, tmp_path: Path) -> None:
    """Boxes, entities and texts; kept rows, an RDD, and a file; the first rows may have none."""
    data = spark.range(0, 30, 1, 2).selectExpr("id AS number", "float(id) AS x")
    named = sparkdl.predict(data, Boxes(), "x", handle_invalid="keep", batch_size=7)
    types = ["array<array<float>>", "bigint", "string", "string"]
    assert [field.dataType.simpleString() for field in named.schema.fields[2:]] == types
    for n, row in enumerate(sorted(named.collect(), key=lambda row: row.number)):
        if n == 13:
            assert (row.boxes, row["count"], row.name) == (None, None, None)
            assert "no thirteen" in row.error
        else:
            assert (row.boxes, row["count"]) == ([[float(n)] * 4] * (n % 3), n % 3)
            assert row.name == f"row {n}"
    outputs = {"found": late, "both": lambda rows: rows, "count": "count"}
    data = data.where("number != 13")
    scored = sparkdl.predict(data, Boxes(), "x", outputs=outputs, path=tmp_path / "found")
    assert [field.dataType.simpleString() for field in scored.schema.fields[2:]] == [
        "array<struct<text:string,span:array<bigint>>>",
        "struct<boxes:array<array<float>>,count:bigint,name:string>",
        "bigint",
    ]
    rows = {row.number: row for row in scored.collect()}
    assert rows[23].found == [("row 23", [0, 1]), ("row 23", [1, 2])]
    assert (rows[2].found, rows[21].found, rows[23].both.boxes) == ([], [], [[23.0] * 4] * 2)
    records = data.rdd.map(lambda row: row.x)
    (*_, last) = sparkdl.predict(records, Boxes(), outputs=outputs).collect()
    assert (last.found, last["count"]) == (
        [{"text": "row 29", "span": [i, i + 1]} for i in (0, 1)],
        2,
    )
    with pytest.raises(sparkdl.ModelError, match=r"no row .* has a result.* pass example="):
        sparkdl.predict(data.where("number < 20"), Boxes(), "x", outputs={"found": late})
    with pytest.raises(sparkdl.ParameterError, match=r'"e": a column cannot hold .*complex'):
        sparkdl.predict(data, Boxes(), "x", outputs={"e": lambda rows: [1j for _ in rows]})


NUMBERS: dict[str, Callable[[Any], int]] = {
    "named_struct('n', id, 's', string(id))": lambda v: v["n"] if v["s"] == str(v["n"]) else -7,
    "named_struct('a', named_struct('n', id), 'f', double('NaN'))": lambda v: v["a"]["n"],
    "array(named_struct('n', id), null)": lambda v: v[0]["n"],
    "named_struct('m', map('id', id))": lambda v: dict(v["m"])["id"],
    "map('s', array(map('id', id)))": lambda v: dict(dict(v)["s"][0])["id"],
    "array(array(id, null), array())": lambda v: v[0][0],
    "date_add(date'2024-01-01', int(id))": lambda v: v.day - 1,
    "timestamp_micros(id)": lambda v: v.microsecond,
    "timestamp_ntz'2024-01-01' + make_dt_interval(0, 0, 0, id)": lambda v: v.second,
    "decimal(id)": int,
    "smallint(id)": int,
    "id": int,
    "string(id)": int,
    "cast(string(id) AS binary)": lambda v: int(bytes(v)),
}
"""Columns of any type, and functions that read the number ``id`` in one."""


def test_values_of_any_type_come_to_the_model_and_back(spark: SparkSession) -> None:
    """Also from a partition of nulls alone, and one without a row."""
    names = [f"c{i}" for i in range(len(NUMBERS))]
    columns = [f"IF(id >= 15 OR id = 2, NULL, {sql}) AS c{i}" for i, sql in enumerate(NUMBERS)]
    data = spark.range(0, 20, 1, 4).where("id NOT BETWEEN 5 AND 9")
    specs = {n: sparkdl.Convert(read) for n, read in zip(names, NUMBERS.values(), strict=True)}
    scored = sparkdl.predict(
        data.selectExpr("id AS number", *columns),
        Columns(),
        names,
        columns=specs,
        handle_invalid="keep",
        batch_size=3,
    )
    for row in scored.collect():
        expected = ([row.number] * len(names), row.number, None)
        if row.number == 2 or row.number >= 15:
            assert row.error.startswith('column "c0" the function of this column raised TypeError')
            expected = (None, None, row.error)
        assert (row["all"], row["first"], row["error"]) == expected
    assert sorted(values(scored, "number")) == [*range(5), *range(10, 20)]
    known = sparkdl.Convert(lambda value: -1 if value is None else value)
    some = data.selectExpr("id AS number", "IF(id = 2, NULL, id) AS x").where("number < 4")
    for way in ("error", "skip"):  # null is a value for this function
        scored = sparkdl.predict(some, Columns(), ["x"], columns={"x": known}, handle_invalid=way)
        assert values(scored, "first") == [0, 1, -1, 3]


def test_rows_are_sorted_by_length_and_come_back_in_order(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = [(number, list(range(1, 1 + length))) for number, length in enumerate(LENGTHS)]
    data = spark.createDataFrame(rows, "number int, ids array<int>").coalesce(1)
    scored = sparkdl.predict(
        data,
        Elements(str(tmp_path / "notes")),
        "ids",
        columns={"ids": sparkdl.Sequence(lengths=True)},
        outputs={"each": 0, "mean": 1},
        batch_size=10,
    )
    (tmp_path / "notes").unlink()  # of the trial
    found = scored.collect()
    assert [row.number for row in found] == list(range(ROWS))
    assert [row.each for row in found] == [[10 * i for i in ids] for _, ids in rows]
    assert [row.mean for row in found] == [sum(ids) / len(ids) for _, ids in rows]
    longest = sorted(LENGTHS, reverse=True)[::10]
    shapes = (tmp_path / "notes").read_text().split("\n")[:-1]
    assert shapes == [f"(10, {length})" for length in longest]


def test_texts_padded_on_the_left(texts: DataFrame) -> None:
    """Predictions for each token are those of the text's own tokens, whatever side is filled up."""
    text = sparkdl.Text(word_lengths, mask=False, lengths=True, padding=-7, padding_side="left")
    how = {"columns": {"text": text}, "outputs": {"each": 0}, "batch_size": 8}
    rows = sparkdl.predict(texts, Elements(), "text", **how).collect()
    assert [row.each for row in rows] == [
        [10 * n for n in word_lengths([row.text])[0]] for row in rows
    ]


def test_texts_are_classified(texts: DataFrame, folder: Path) -> None:
    scored = sparkdl.classify(texts, folder, scores_col="scores", batch_size=8)
    model, tokenizer = small_text.classifier(), small_text.tokenizer()
    with torch.no_grad():
        inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
        expected = model(inputs.input_ids, inputs.attention_mask).logits.softmax(1)
    same(values(scored, "scores"), expected, rtol=1e-4, atol=1e-5)
    same(values(scored, "score"), expected.amax(1), rtol=1e-4, atol=1e-5)
    names = [model.config.id2label[number] for number in expected.argmax(1).tolist()]
    assert values(scored) == names
    assert len(set(names)) > 1
    alone = copy.deepcopy(model)
    alone.classifier, alone.config.id2label = nn.Linear(16, 1), {0: "good"}
    scored = sparkdl.classify(texts, alone, tokenizer=tokenizer)
    with torch.no_grad():
        expected = alone(inputs.input_ids, inputs.attention_mask).logits.sigmoid()[:, 0]
    same(values(scored, "score"), expected, rtol=1e-4, atol=1e-5)
    logits = sparkdl.predict(texts, model, "text", tokenizer=tokenizer)
    same(
        values(logits), model(inputs.input_ids, inputs.attention_mask).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("pooling", soak_but(["mean", "last"], ["mean", "cls", "max", "last"]))
def test_texts_are_embedded(texts: DataFrame, folder: Path, pooling: str) -> None:
    model, tokenizer = small_text.classifier().bert, small_text.tokenizer()
    given = copy.deepcopy(tokenizer)
    given.padding_side = "left" if pooling == "last" else "right"
    scored = sparkdl.embed(
        texts, folder, pooling=pooling, normalize=pooling != "last", tokenizer=given
    )
    rows = []
    for text in TEXTS:
        with torch.no_grad():
            (hidden,) = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        pooled = {
            "mean": hidden.mean(0),
            "cls": hidden[0],
            "max": hidden.amax(0),
            "last": hidden[-1],
        }
        rows.append(pooled[pooling])
    expected = torch.stack(rows)
    if pooling != "last":
        expected = nn.functional.normalize(expected, dim=1)
    same(values(scored, "embedding"), expected, rtol=1e-3, atol=1e-4)


def test_a_module_that_changes_is_sent_again(points: DataFrame) -> None:
    module = nn.Linear(3, 2)
    before = values(sparkdl.predict(points, module, "x", quantize="int8"))
    with torch.no_grad():
        module.bias += 1
    after = values(sparkdl.predict(points, module, "x", quantize="int8"))
    same(after, torch.tensor(before) + 1)


@pytest.mark.parametrize("option", [{"precision": "bf16"}, {"quantize": "int8"}, {}], ids=str)
def test_lower_precision_is_close(points: DataFrame, option: dict[str, str]) -> None:
    """Also of a module whose weights torch has packed, so that its state is not tensors alone."""
    packed = torch.ao.quantization.quantize_dynamic(NET, {nn.Linear}, dtype=torch.qint8)
    found = torch.tensor(values(sparkdl.predict(points, NET if option else packed, "x", **option)))
    expected = NET(torch.from_numpy(POINTS)).detach()
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert NET[0].weight.dtype == torch.float32


BAD: dict[int, tuple[Any, str]] = {
    0: (None, 'column "x" is null.'),
    7: ([1.0, float("nan"), 1.0], f'column "x" holds {"NaN" if ARROW_FUNCTIONS else "a null"}.'),
    20: ([1.0, 2.0], "the model fails on a batch of [1, 2] float32: RuntimeError: mat1 and mat2"),
    33: ([1.0, None, 2.0], 'column "x" holds a null.'),
}


@pytest.fixture(scope="module")
def partly_bad(spark: SparkSession) -> DataFrame:
    rows = [(n, BAD[n][0] if n in BAD else row.tolist()) for n, row in enumerate(POINTS)]
    return spark.createDataFrame(rows, "number int, x array<float>").coalesce(1)


WAYS: dict[str, Callable[..., Any]] = {
    "any": lambda data, **how: sparkdl.predict(data, NET, "x", **how),
    "trained": lambda data, **how: trained_on_points().transform(data, **how),
}


@pytest.mark.parametrize("way", WAYS)
def test_bad_rows_are_kept_with_the_reason(partly_bad: DataFrame, way: str) -> None:
    scored = WAYS[way](partly_bad, handle_invalid="keep", error_col="why")
    expected = NET(torch.from_numpy(POINTS))
    rows = scored.collect()
    assert [row.number for row in rows] == list(range(ROWS))
    good = [row for row in rows if row.number not in BAD]
    assert {row.why for row in good} == {None}
    same([row.prediction for row in good], expected[[row.number for row in good]])
    for number, (_, reason) in BAD.items():
        assert rows[number].prediction is None
        assert rows[number].why.startswith(reason)


@pytest.mark.parametrize("way", WAYS)
def test_bad_rows_are_skipped(partly_bad: DataFrame, way: str) -> None:
    scored = WAYS[way](partly_bad, handle_invalid="skip")
    assert scored.columns == ["number", "x", "prediction"]
    assert [row.number for row in scored.collect()] == [n for n in range(ROWS) if n not in BAD]


def test_records_are_scored(spark: SparkSession) -> None:
    """In their order, whoever trained the model; bad ones are kept, or skipped."""
    good = [row.tolist() for row in POINTS]
    bad = [BAD[n][0] if n in BAD else row for n, row in enumerate(good)]
    expected = NET(torch.from_numpy(POINTS))
    records = spark.sparkContext.parallelize(good, 2)
    same(np.stack(sparkdl.predict(records, NET, batch_size=16).collect()), expected)
    (several, *_) = sparkdl.predict(records, Several(), outputs=["total", "doubled"]).collect()
    assert several.doubled.tolist() == (2 * POINTS[0]).tolist()
    records = spark.sparkContext.parallelize(bad, 1)
    for predict in (partial(sparkdl.predict, model=NET), trained_on_points().predict):
        rows = predict(records, handle_invalid="keep", error_col="why").collect()
        assert [n for n, row in enumerate(rows) if row.why] == sorted(BAD)
        assert [row.prediction is None for row in rows] == [bool(row.why) for row in rows]
        assert rows[7].why == 'field "features" holds NaN.'
        good_rows = [row.prediction for row in rows if not row.why]
        same(np.stack(good_rows), expected[[n for n in range(ROWS) if n not in BAD]])
        skipped = predict(records, handle_invalid="skip").collect()
        assert np.array_equal(skipped, good_rows)
    with pytest.raises(sparkdl.ParameterError, match="path= is for a DataFrame"):
        sparkdl.predict(records, NET, path="there", handle_invalid="skip")


def test_a_bad_row_fails_the_job(partly_bad: DataFrame) -> None:
    scored = sparkdl.predict(partly_bad, NET, "x", example=partly_bad.where("number = 1"))
    with pytest.raises(Exception, match=r'DataError: column "x", row 0 of partition 0: is null'):
        scored.collect()


def test_a_failed_job_goes_on_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    data = spark.range(100).selectExpr("id AS number", "float(id) AS x", "'text' AS kept")
    (tmp_path / "bad").touch()
    last = data.where(partition_of(data, 8) == 7).first().x
    model = Fails(last, str(tmp_path / "bad"), str(tmp_path / "seen"))
    write = partial(
        sparkdl.predict, data, model, "x", path=tmp_path / "out", partitions=8, batch_size=4
    )
    with pytest.raises(sparkdl.SparkdlError, match="is no number"):
        write()
    innards.wait_for_tasks(spark.sparkContext)  # they finish files
    finished = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.parquet")}
    assert 0 < len(finished) < 8
    cut_short = next(file for file in finished if pq.read_metadata(file).num_rows)
    del finished[cut_short]  # by a task that was ended, which saw the end of its rows
    name = re.sub(r"-\d+-\w+\.parquet", f"-{written._digest(0, 0)}.parquet", cut_short.name)
    cut_short.rename(cut_short.with_name(name))
    already = 0 if not finished else spark.read.parquet(*map(str, finished)).count()
    (tmp_path / "bad").unlink()
    (tmp_path / "seen").unlink()
    result = write()
    trial = 2
    seen = sum(map(int, (tmp_path / "seen").read_text().split()))
    assert seen == 100 - already + trial
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    assert result.columns == ["number", "x", "kept", "prediction"]
    assert values(result) == [number + 0.5 for number in range(100)]
    assert values(write()) == values(result)
    assert spark.read.parquet(str(tmp_path / "out")).schema == result.schema
    with pytest.raises(sparkdl.ParameterError, match=r"holds other predictions .* overwrite=True"):
        write(partitions=4)
    other = {"data": data.where("number <> 7"), "model": model}
    with pytest.raises(
        sparkdl.ParameterError, match=r"predictions of other rows .* overwrite=True"
    ):
        sparkdl.predict(**other, **write.keywords, features="x")
    assert values(write()) == values(result)
    assert write(partitions=4, overwrite=True).count() == 100
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 4


class Killed(BaseException):
    """The end of a process."""


def test_predictions_that_replace_others_leave_the_old_or_the_new_ones(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a reader is told, for the moment in which files change places; a later call goes on."""
    data = spark.range(3).selectExpr("id AS number", "float(id) AS x")
    write = partial(sparkdl.predict, data, features="x", partitions=1, overwrite=True)
    old, new = [1.0, 2.0, 3.0], [3.0, 4.0, 5.0]
    seen, steps, killed = [], 0, True
    while killed:
        folder = tmp_path / f"after-{steps}"
        write(Plus(1.0), path=folder)
        left = steps

        def step(done: Callable[..., None], *args: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            done(*args)

        with monkeypatch.context() as patched:
            for name in ("write", "move", "delete"):
                done = getattr(Folder, name)
                patched.setattr(Folder, name, lambda *args, done=done: step(done, *args))
            try:
                write(Plus(3.0), path=folder)
                killed = False
            except Killed:
                pass
        try:
            found = sorted(row.prediction for row in spark.read.parquet(str(folder)).collect())
            assert found in (old, new)
            seen.append("old" if found == old else "new")
        except Exception as error:
            named = "predictions-are-being-replaced" in str(error)
            seen.append("told" if named else str(error))
            assert values(write(Plus(3.0), path=folder, overwrite=False)) == new
        assert values(write(Plus(3.0), path=folder)) == new
        assert [path.name[:5] for path in folder.iterdir() if path.name[0] != "."] == ["part-"]
        steps += 1
    assert seen == ["old", "told", "told", "told", "new"]


def test_a_folder_for_the_predictions_alone(spark: SparkSession, tmp_path: Path) -> None:
    """Its name may be a pattern, some partitions without rows; the rows are not read from there."""
    data = spark.range(3).selectExpr("id AS number", "float(id) AS x", "'text' AS kept")
    write = partial(sparkdl.predict, features="x", path=tmp_path / "out[1]{a,b}")
    result = write(data, partial(Plus, 1.0))
    assert result.count() == write(data, partial(Plus, 1.0)).count() == 3
    assert write(data.where("false"), Plus(1.0), overwrite=True).count() == 0
    result = write(data, Plus(1.0), partitions=2, overwrite=True)
    assert values(result) == [1.0, 2.0, 3.0]
    with pytest.raises(sparkdl.ParameterError, match="holds other predictions"):
        write(data, Plus(2.0), partitions=2)
    with pytest.raises(sparkdl.ParameterError, match="the rows to predict are read from there"):
        write(result.drop("prediction"), Plus(1.0), overwrite=True)
    assert values(result) == [1.0, 2.0, 3.0]
    with pytest.raises(sparkdl.DataError, match='column "kept" is ambiguous'):
        write(data.selectExpr("*", "kept"), Plus(1.0))
    data.write.parquet(str(tmp_path / "in"))
    for overwrite in (True, False):
        told = r"holds something else .*: give path= a folder of its own"
        with pytest.raises(sparkdl.ParameterError, match=told):
            sparkdl.predict(data, Plus(1.0), "x", path=tmp_path / "in", overwrite=overwrite)


def test_rows_that_are_skipped_count_as_rows_of_a_file(
    partly_bad: DataFrame, tmp_path: Path
) -> None:
    """So a second call knows the rows again, and notices other ones, where bad rows are left out."""
    options = {"path": tmp_path, "partitions": 3, "handle_invalid": "skip"}
    written = sparkdl.predict(partly_bad, NET, "x", **options)
    lazy = sparkdl.predict(partly_bad, NET, "x", handle_invalid="skip")
    assert written.schema == lazy.schema
    assert values(written, "number") == values(lazy, "number")
    same(values(written), torch.tensor(values(lazy)))
    next(tmp_path.glob("part-00001*")).unlink()
    assert sparkdl.predict(partly_bad, NET, "x", **options).count() == ROWS - len(BAD)
    for changed in (partly_bad.where(f"number <> {min(BAD)}"), partly_bad.union(partly_bad)):
        with pytest.raises(sparkdl.ParameterError, match="predictions of other rows"):
            sparkdl.predict(changed, NET, "x", **options)


def test_a_stream_is_scored(spark: SparkSession, points: DataFrame, tmp_path: Path) -> None:
    points.write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(points.schema).parquet(str(tmp_path / "in"))
    with pytest.raises(sparkdl.DataError, match=r"the data is a stream.*pass example="):
        sparkdl.predict(stream, NET, "x")
    scored = sparkdl.predict(stream, NET, "x", example=points)
    query = (
        scored.writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    query.awaitTermination()
    same(values(spark.read.parquet(str(tmp_path / "out"))), NET(torch.from_numpy(POINTS)))


def test_a_function_of_sql(
    spark: SparkSession, points: DataFrame, texts: DataFrame, folder: Path
) -> None:
    points.createOrReplaceTempView("points")
    texts.createOrReplaceTempView("texts")
    score = sparkdl.register_function("score", NET, points, "x")
    expected = NET(torch.from_numpy(POINTS))
    same(values(spark.sql("SELECT number, score(x) AS prediction FROM points")), expected)
    same(values(points.select("number", score("x").alias("prediction"))), expected)
    for kind in ("array<double>", "array<decimal(20, 12)>"):
        found = points.select("number", score(points.x.cast(kind)).alias("prediction"))
        same(values(found), expected)
    told = r'DataError: column "x" is of type int32 here, and .* for array<number>: cast it'
    with pytest.raises(Exception, match=told):
        spark.sql("SELECT score(number) FROM points").collect()
    sparkdl.register_function("klass", folder, texts, "text", use=sparkdl.classify)
    found = spark.sql("SELECT number, klass(text).prediction AS prediction FROM texts")
    assert values(found) == values(sparkdl.classify(texts, folder))
    sparkdl.register_function("vector", folder, texts, use=sparkdl.embed, pooling="cls")
    found = spark.sql("SELECT number, vector(text) AS prediction FROM texts")
    assert values(found) == values(sparkdl.embed(texts, folder, pooling="cls"), "embedding")


def pooled_folder(path: Path) -> Path:
    """A folder of sentence-transformers whose vectors are more than a pooling."""
    small_text.classifier().save_pretrained(path)
    small_text.tokenizer().save_pretrained(path)
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    modes = {f"pooling_mode_{mode}": mode != "mean" for mode in ("cls_token", "mean", "max_tokens")}
    (path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(modes), encoding="utf-8")
    return path


def regressor() -> Any:
    """A model of texts that gives numbers."""
    model = copy.deepcopy(small_text.classifier())
    model.config.problem_type = "regression"
    return model


def bare_folder(path: Path) -> Path:
    """The folder of a model alone, for which transformers makes a tokenizer that knows no word."""
    small_text.classifier().save_pretrained(path / "bare")
    return path / "bare"


def pipeline() -> Any:
    return transformers.pipeline(
        "text-classification", model=small_text.classifier(), tokenizer=small_text.tokenizer()
    )


MISTAKES: dict[str, tuple[Callable[[DataFrame, Path], Any], str]] = {
    "no model": (
        lambda df, path: sparkdl.predict(df, 3, "x"),
        "model is an int: give a torch.nn.Module, a function that builds one",
    ),
    "no file": (
        lambda df, path: sparkdl.predict(df, "org/model", "x"),
        'there is no file or folder "org/model" on the driver. A model of a hub must be there first',
    ),
    "weights alone": (
        lambda df, path: sparkdl.predict(df, path / "n.pt", "x"),
        r"If it holds weights, give the function that builds their module too: predict(df, make_model",
    ),
    "an empty folder": (
        lambda df, path: sparkdl.predict(df, path, "x"),
        "has no config.json: give one that save_pretrained wrote",
    ),
    "a folder without a tokenizer": (
        lambda df, path: sparkdl.classify(df.selectExpr("'a' AS text"), bare_folder(path)),
        "has no tokenizer that can be read (there is no",
    ),
    "weights of another model": (
        lambda df, path: sparkdl.predict(df, partial(nn.Linear, 3, 2), "x", weights=path / "n.pt"),
        'weights do not fit the model: the model has no "0.weight"',
    ),
    "a whole checkpoint": (
        lambda df, path: sparkdl.predict(df, net, "x", weights={"model": NET.state_dict()}),
        "give the state_dict inside it, as weights=torch.load(path)['model']",
    ),
    "weights for a module": (
        lambda df, path: sparkdl.predict(df, NET, "x", weights=NET.state_dict()),
        "weights= goes with a function that builds the module",
    ),
    "no column": (
        lambda df, path: sparkdl.predict(df, NET),
        'feature column "features" is missing.',
    ),
    "another width": (
        lambda df, path: sparkdl.predict(df, nn.Linear(5, 1), "x"),
        "the model fails on a batch of [2, 3] float32: RuntimeError: mat1 and mat2 shapes",
    ),
    "no such output": (
        lambda df, path: sparkdl.predict(df, Several(), "x", outputs=["totals"]),
        "output='totals': the model returned a dict of 'total' [2], 'doubled' [2, 3]",
    ),
    "one output for all rows": (
        lambda df, path: sparkdl.predict(df, Several(), "x", outputs="mean"),
        'output "prediction" is a tensor of shape [] for a batch of 2 rows',
    ),
    "a column that exists": (
        lambda df, path: sparkdl.predict(df, NET, "x", prediction_col="Number"),
        'the DataFrame already has a column "number"',
    ),
    "the name of the errors": (
        lambda df, path: sparkdl.predict(
            df, NET, "x", prediction_col="ERROR", handle_invalid="keep"
        ),
        'new columns would have one name, "ERROR" and "error": choose another name with ',
    ),
    "one name but for case": (
        lambda df, path: sparkdl.predict(
            df, Several(), "x", outputs={"A": "total", "a": "doubled"}
        ),
        'new columns would have one name, "A" and "a": choose another name',
    ),
    "a precision": (
        lambda df, path: sparkdl.predict(df, NET, "x", precision="int4"),
        "precision='int4': use one of fp32, bf16, fp16.",
    ),
    "nothing to quantize": (
        lambda df, path: sparkdl.predict(df, Several(), "x", quantize="int8"),
        'quantize="int8" is for layers of GRU, LSTM, Linear, and the model (Several) has none.',
    ),
    "handling": (
        lambda df, path: sparkdl.predict(df, NET, "x", handle_invalid="ignore"),
        "handle_invalid='ignore': use one of error, skip, keep.",
    ),
    "no tokenizer": (
        lambda df, path: sparkdl.embed(df, small_text.classifier().bert, "text"),
        'column "text" is text: give the tokenizer of the model',
    ),
    "a tokenizer for numbers": (
        lambda df, path: sparkdl.predict(df, NET, "x", tokenizer=small_text.tokenizer()),
        "tokenizer= is given, and no feature column (x) is text",
    ),
    "text of numbers": (
        lambda df, path: sparkdl.embed(df, small_text.classifier().bert, "x"),
        'column "x" is of type array<float>, not text: for numbers use sparkdl.predict.',
    ),
    "a pipeline": (
        lambda df, path: sparkdl.classify(df, pipeline()),
        "a pipeline of transformers: give its .model, and tokenizer= its .tokenizer.",
    ),
    "a head": (
        lambda df, path: sparkdl.embed(
            df, small_text.classifier(), "text", tokenizer=small_text.tokenizer()
        ),
        "without last_hidden_state: embed takes a model without a head",
    ),
    "other poolings": (
        lambda df, path: sparkdl.embed(df, pooled_folder(path)),
        "makes vectors with Dense, pooling_mode_cls_token, pooling_mode_max_tokens, which embed does",
    ),
    "one name for two columns": (
        lambda df, path: sparkdl.classify(
            df, small_text.classifier(), tokenizer=small_text.tokenizer(), prediction_col="Score"
        ),
        'new columns would have one name, "Score" and "score": choose another name.',
    ),
    "numbers": (
        lambda df, path: sparkdl.classify(df, regressor(), tokenizer=small_text.tokenizer()),
        "the model gives numbers (problem_type: regression), not classes: use sparkdl.predict",
    ),
    "no classes": (
        lambda df, path: sparkdl.classify(df, NET, "text"),
        "whose configuration names no classes (id2label)",
    ),
    "a name of SQL": (
        lambda df, path: sparkdl.register_function("to score", NET, df, "x"),
        "name='to score': give a name of letters",
    ),
    "an argument of SQL": (
        lambda df, path: sparkdl.register_function("f", NET, df, "x", output="y"),
        """no argument 'output'. Did you mean "outputs"?""",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_before_any_job_scores(
    points: DataFrame, tmp_path: Path, mistake: str
) -> None:
    torch.save(NET.state_dict(), tmp_path / "n.pt")
    call, message = MISTAKES[mistake]
    with pytest.raises(sparkdl.UserError) as raised:
        call(points.selectExpr("*", "string(number) AS text"), tmp_path)
    assert message in str(raised.value)
