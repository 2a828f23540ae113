"""Images, sequences, functions and weights: from DataFrames and RDDs into samples and predictions."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hex_column import Hex
from launch import soak_but
from pyspark import RDD, cloudpickle
from pyspark.ml.linalg import Vectors
from sample_reader import Reader as AnyReader
from sample_reader import same
from torch import nn
from trained import trained_model

from sparkdl import (
    Convert,
    Image,
    Masked,
    MaskedLoss,
    MetricOf,
    ModelError,
    Sequence,
    Sparse,
    Trainer,
    load,
    max_iteration,
)
from sparkdl.data.fields import Field
from sparkdl.data.partition_reader import open_partition
from sparkdl.data.ragged import Padding, Ragged
from sparkdl.data.records import Sample
from sparkdl.data.samples import SampleSet
from sparkdl.errors import DataError
from sparkdl.infer.model import TrainedModel
from sparkdl.infer.outputs import Output
from sparkdl.loop.history import History

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules[Hex.__module__])


class Reader(AnyReader):
    """Reads in this process, without a label, if nothing else is said."""

    def samples(self, data: Any, features: Any, label: Any = (), **how: Any) -> SampleSet:  # type: ignore[override]
        return super().samples(data, features, label, **{"here": True, **how})


@pytest.fixture
def reader(spark: Any) -> Iterator[Reader]:
    reader = Reader(spark)
    yield reader
    reader.close()


# Images


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight PNGs of 6 x 5, the first pixel of number i all of value i, and one that is broken."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for i in range(8):
        pixels = random.integers(0, 256, (6, 5, 3), dtype=np.uint8)
        pixels[0, 0] = i
        PIL.Image.fromarray(pixels).save(folder / f"{i}.png")
    broken = tmp_path_factory.mktemp("broken")
    (broken / "x.png").write_bytes(b"no picture at all")
    return folder


def expected_pixels(folder: Path) -> np.ndarray:
    """(8, 3, 6, 5), ordered by the first pixel."""
    return np.stack(
        [np.asarray(PIL.Image.open(folder / f"{i}.png")).transpose(2, 0, 1) for i in range(8)]
    )


def test_images_of_sparks_two_sources(reader: Reader, pictures: Path) -> None:
    """The image source needs no specification; binaryFile's bytes have one."""
    decoded = reader.spark.read.format("image").load(str(pictures))
    encoded = reader.spark.read.format("binaryFile").load(f"{pictures}/*.png")
    found = [
        reader.samples(decoded, ["image"]),
        reader.samples(encoded, ["content"], columns={"content": Image()}),
        reader.samples(encoded, ["content"], columns={"content": Image()}, here=False),
    ]
    expected = expected_pixels(pictures).astype(np.float32) * np.float32(1 / 255)
    for samples, name in zip(found, ["image", "content", "content"], strict=True):
        assert samples.fields == (Field(name, "float32", (3, 6, 5)),)
        (images,) = reader.rows(samples)
        np.testing.assert_array_equal(images[np.argsort(images[:, 0, 0, 0])], expected)
    assert same(found[1], found[2])


def test_resized_bytes_and_a_mask_as_label(reader: Reader, pictures: Path) -> None:
    data = reader.spark.read.format("binaryFile").load(f"{pictures}/*.png")
    data = data.selectExpr("content", "content AS mask")
    specs = {"content": Image(size=(4, 3), scale=None), "mask": Image(mode="L", scale=None)}
    samples = reader.samples(data, ["content"], ["mask"], columns=specs)
    assert samples.fields == (
        Field("content", "uint8", (3, 4, 3)),
        Field("mask", "uint8", (1, 6, 5)),
    )
    assert (samples.num_features, samples.num_labels, samples.weighted) == (1, 1, False)


READ: dict[str, tuple[str, str, list[str]]] = {
    "a column of paths": ("binaryFile", "content", ["content", "path"]),
    "files that Spark knows": ("binaryFile", "content", ["content"]),
    "the image source": ("image", "image", ["image"]),
}


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("case", READ)
def test_a_damaged_file_is_named(reader: Reader, tmp_path: Path, case: str, here: bool) -> None:
    source, name, columns = READ[case]
    PIL.Image.new("RGB", (6, 5)).save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"no picture at all")
    data = reader.spark.read.format(source).load(str(tmp_path)).select(columns)
    with pytest.raises(DataError, match=r"row 0 of partition \d.* \(file:/.*/broken.png\)"):
        reader.samples(data, [name], columns={name: Image()}, here=here)


def test_a_damaged_file_that_is_gone_is_told_all_the_same(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no picture at all")

    def picture(content: bytes) -> np.ndarray:
        (tmp_path / "broken.png").unlink(missing_ok=True)
        raise ValueError("no picture")

    data = reader.spark.read.format("binaryFile").load(str(tmp_path))
    with pytest.raises(DataError, match=r"row 0 of partition \d.*no picture"):
        reader.samples(data, ["content"], columns={"content": Convert(picture)})


# Sequences and functions


def texts(reader: Reader, count: int = 30) -> Any:
    return reader.spark.range(count).selectExpr(
        "transform(sequence(1, 1 + int(id % 7)), i -> i * id) AS words",
        "concat('n', id) AS text",
        "map('id', id) AS bag",
        "float(id % 2) AS label",
        "double(id) / 10 AS w",
    )


def number(text: str) -> int:
    return int(text[1:])


@pytest.mark.parametrize("here", [True, False])
def test_sequences_functions_and_weights(reader: Reader, here: bool) -> None:
    """A map, which Spark cannot hash, among them: the rows are redistributed by content."""
    specs = {
        "words": Sequence(max_length=5, padding=-1, lengths=True),
        "text": Convert(number),
        "bag": Convert(lambda entries: dict(entries)["id"]),
    }
    features = ["words", "text", "bag"]
    data = texts(reader).repartition(5)
    samples = reader.samples(data, features, ["label"], columns=specs, weight="w", here=here)
    assert samples.fields == (
        Field("words", "int64", (), Padding(value=-1, lengths=True)),
        Field("text", "int64", ()),
        Field("bag", "int64", ()),
        Field("label", "float32", ()),
        Field("w", "float32", ()),
    )
    assert (samples.num_features, samples.num_labels, samples.weighted) == (3, 1, True)
    words, text, bag, label, weight = reader.rows(samples)
    assert sorted(text.tolist()) == list(range(30))
    assert text.tolist() == bag.tolist()
    np.testing.assert_allclose(weight, text / 10, rtol=1e-6)
    np.testing.assert_array_equal(label, text % 2)
    assert [row.tolist() for row in words] == [
        [i * n for i in range(1, 2 + n % 7)][:5] for n in text.tolist()
    ]
    assert isinstance(samples.preview[0], Ragged)
    assert samples.preview[0].lengths.max() == 5
    assert same(
        samples,
        reader.samples(
            texts(reader).repartition(3), features, ["label"], columns=specs, weight="w"
        ),
    )


MAPS_WITHIN = {
    "struct(id AS n, map('id', id) AS inner)": lambda value: dict(value["inner"])["id"],
    "array(map('id', id), map())": lambda value: dict(value[0])["id"],
    "map('outer', map('id', id))": lambda value: dict(dict(value)["outer"])["id"],
    "map('s', array(struct(map('id', id) AS m)))": lambda v: dict(dict(v)["s"][0]["m"])["id"],
}


def test_maps_within_other_types(reader: Reader) -> None:
    """Each is a function's to read, and no less redistributed by its content."""
    columns = [f"{text} AS c{n}" for n, text in enumerate(MAPS_WITHIN)]
    names = [f"c{n}" for n in range(len(columns))]
    specs = {n: Convert(f) for n, f in zip(names, MAPS_WITHIN.values(), strict=True)}
    data = reader.spark.range(20).selectExpr(*columns)
    samples = reader.samples(data.repartition(5), names, columns=specs)
    for column in reader.rows(samples):
        assert sorted(column.tolist()) == list(range(20))
    assert same(samples, reader.samples(data.repartition(3), names, columns=specs))


def test_a_function_that_fails_names_column_and_row(reader: Reader) -> None:
    data = texts(reader, 4).selectExpr("if(text = 'n3', 'three', text) AS text").coalesce(1)
    with pytest.raises(DataError) as caught:
        reader.samples(data, ["text"], columns={"text": Convert(number)}, replicas=1)
    assert str(caught.value) == (
        'column "text", row 3 of partition 0: the function of this column raised ValueError: '
        "invalid literal for int() with base 10: 'hree'. It was given 'three'. Fix the function, "
        "or filter out such rows."
    )


def test_large_rows_are_decoded_in_parts(reader: Reader) -> None:
    """1,200 rows that grow to 48 KB each: 56 MB decoded, from one Arrow batch."""
    data = reader.spark.range(0, 1200, 1, 1)
    specs = {"id": Convert(lambda i: np.full(12_000, i, np.float32))}
    samples = reader.samples(data, ["id"], columns=specs, replicas=1, here=False)
    (found,) = (open_partition(samples.handles[0]).gather(np.arange(1200))[0],)
    assert sorted(found[:, 7].tolist()) == list(range(1200))


# RDDs


def records(reader: Reader, values: list[Any], parts: int = 2) -> RDD:
    return reader.context.parallelize(values, parts)


@pytest.mark.parametrize("here", [True, False])
def test_records_of_varying_length_with_weights(reader: Reader, here: bool) -> None:
    values = [Sample((list(range(1, 2 + i % 4)), float(i)), i % 2, weight=i / 2) for i in range(12)]
    specs = {"features[0]": Sequence(max_length=3)}
    samples = reader.samples(
        records(reader, values, 3), ["f"], ["l"], columns=specs, weight="weight", here=here
    )
    assert samples.fields == (
        Field("features[0]", "int64", (), Padding()),
        Field("features[1]", "float32", ()),
        Field("label", "int64", ()),
        Field("weight", "float32", ()),
    )
    assert (samples.num_features, samples.num_labels, samples.weighted) == (2, 1, True)
    words, numbers, _, weights = reader.rows(samples)
    assert [row.tolist() for row in words] == [list(range(1, 2 + int(i) % 4))[:3] for i in numbers]
    np.testing.assert_array_equal(weights, numbers / 2)


@pytest.mark.parametrize(
    ("values", "more", "text"),
    [
        ([([1.0], 1.0)], {"weight": "weight"}, 'field "weight", row 0 of partition 0: is missing.'),
        (
            [Sample([1.0], 1.0, weight=-1)],
            {"weight": "weight"},
            'field "weight", row 0 of partition 0: is -1.0, but a weight must be a finite number',
        ),
        (
            [([1.0], 1.0)],
            {"columns": {"words": Sequence()}},
            'columns names "words", which is not a field of the records. They have: features, '
            "label.",
        ),
        (
            [(1.0, 1.0)],
            {"columns": {"features": Sequence()}},
            'field "features", row 0 of partition 0: is a number, not a sequence of numbers.',
        ),
        (
            [([[1.0, 2.0]], 1.0), ([[1.0, 2.0], [3.0, 4.0]], 1.0), ([[1.0]], 1.0)],
            {"columns": {"features": Sequence()}},
            'field "features", row 2 of partition 0: is float32[1, 1] where row 0 is float32[1, 2]',
        ),
    ],
)
def test_records_that_cannot(
    reader: Reader, values: list[Any], more: dict[str, Any], text: str
) -> None:
    with pytest.raises(DataError) as caught:
        reader.samples(records(reader, values, 1), ["f"], ["l"], replicas=1, **more)
    assert str(caught.value).startswith(text)


# Predictions


class Mean(nn.Module):
    """Mean of each row's words, by its length, plus one number a row."""

    def forward(
        self, words: torch.Tensor, lengths: torch.Tensor, number: torch.Tensor
    ) -> torch.Tensor:
        seen = torch.arange(words.shape[1]) < lengths[:, None]
        return (words * seen).sum(dim=1) / lengths + number


def test_predictions_on_sequences_and_text(reader: Reader) -> None:
    """Padding does not depend on what the batches are."""
    specs = {"words": Sequence(padding=99, lengths=True), "text": Convert(number)}
    model = scoring(Mean(), Output((), "float32"), specs)
    for row in model.transform(texts(reader), batch_size=4).collect():
        expected = sum(row.words) / len(row.words) + number(row.text)
        assert row.prediction == pytest.approx(expected)
    values = [([1, 2, 3], 1), ([4], 0), ([5, 7], 2)]
    model = scoring(
        Mean(), Output((), "float32"), {"words": Sequence(lengths=True), "number": None}
    )
    for batch_size in (1, 2, 10):
        given = records(reader, [(value,) for value in values], 1).map(lambda v: v[0])
        assert model.predict(given, batch_size=batch_size).collect() == [3.0, 4.0, 8.0]


def scoring(module: nn.Module, output: Output, columns: Any) -> TrainedModel:
    """As it comes from training on these columns; None is a column without a specification."""
    specs = {name: spec for name, spec in columns.items() if spec is not None}
    return trained_model(
        module, features=tuple(columns), fields=(), num_features=len(columns), columns=specs,
        output=output,
    )  # fmt: skip


def test_an_output_as_long_as_the_sequences(reader: Reader) -> None:
    """Batches differ in length, and so do the lists that come out."""
    model = scoring(nn.Identity(), Output((7,), "int64"), {"words": Sequence(padding=-1)})
    found = model.transform(texts(reader, 7).coalesce(1), "p", batch_size=3).collect()
    assert [row.p[: len(row.words)] for row in found] == [row.words for row in found]
    assert [len(row.p) for row in found] == [3, 3, 3, 6, 6, 6, 7]


def test_predictions_on_images(reader: Reader, pictures: Path) -> None:
    data = reader.spark.read.format("binaryFile").load(f"{pictures}/*.png")
    model = scoring(nn.Flatten(), Output((90,), "float32"), {"content": Image(scale=1)})
    values = np.array([row.p for row in model.transform(data, "p", batch_size=3).collect()])
    np.testing.assert_array_equal(
        values[np.argsort(values[:, 0])], expected_pixels(pictures).reshape(8, -1)
    )


def test_a_damaged_image_in_predictions(reader: Reader) -> None:
    data = reader.spark.createDataFrame([(bytearray(b"broken"),)], "photo binary")
    found = scoring(nn.Flatten(), Output((1,), "float32"), {"photo": Image()}).transform(data)
    with pytest.raises(Exception, match=r'column "photo", row 0 of partition \d: is not an image'):
        found.collect()


class Bag(nn.Module):
    """Sums rows of a table, each times a value."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(4096, 2, mode="sum")
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self.table(indices, per_sample_weights=values) + self.bias


class Texts(nn.Module):
    """The mean over lists of lists of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, texts: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        words = self.words(texts).sum((1, 2)) / mask.sum((1, 2)).clamp(1)[:, None]
        return self.out(words)


def as_plainly(
    trainer: Trainer, trained: TrainedModel, inputs: list[torch.Tensor], labels: Any
) -> None:
    """Check losses, and weights, against PyTorch on the whole table at once."""
    module = copy.deepcopy(trainer.model)
    optimizer, losses = trainer.optimizer(module.parameters()), []
    for _ in trained.history.losses:
        loss = trainer.loss(module(*inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert trained.history.losses == pytest.approx(losses, rel=1e-5)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(trained.module.state_dict()[name], value)


@pytest.mark.parametrize("form", soak_but(["indices"], ["dense", "tensor", "indices"]))
def test_vectors_without_their_zeros(reader: Reader, tmp_path: Path, form: str) -> None:
    """From a file of libsvm: trained as in PyTorch, small in slabs, saved, loaded, used."""
    random = np.random.default_rng(5)
    rows = [
        {int(i): float(random.normal()) for i in sorted(random.choice(4096, n, replace=False))}
        for n in random.integers(0, 7, 40)
    ]
    lines = [
        " ".join([str(row % 2), *(f"{i + 1}:{value}" for i, value in entries.items())])
        for row, entries in enumerate(rows)
    ]
    (tmp_path / "data.txt").write_text("\n".join(lines), encoding="utf-8")
    libsvm = reader.spark.read.format("libsvm").option("numFeatures", "4096")
    data = libsvm.load(str(tmp_path / "data.txt")).selectExpr("features", "int(label) AS label")
    columns = {"features": Sparse(4096, form)}
    torch.manual_seed(1)
    trainer = Trainer(
        model=Bag() if form == "indices" else nn.Linear(4096, 2), loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.5), columns=columns, batch_size=40, replicas=2,
        stop=max_iteration(5),
    )  # fmt: skip
    trained = trainer.fit(data)
    dense = torch.zeros(40, 4096)
    for row, entries in enumerate(rows):
        dense[row, list(entries)] = torch.tensor(list(entries.values()))
    everything = torch.arange(4096).expand(40, -1)
    inputs = [everything, dense] if form == "indices" else [dense]
    as_plainly(trainer, trained, inputs, torch.arange(40) % 2)
    samples = reader.samples(data, ["features"], ["label"], columns=columns)
    entries = reader.rows(samples)[0]
    assert entries.nbytes < 40 * 6 * 8 + 8 * 50
    loaded = load(trained.save(tmp_path / "model"), model=lambda: copy.deepcopy(trainer.model))
    found = loaded.transform(data, "p").collect()
    with torch.no_grad():
        wanted = {
            tuple(x): p
            for x, p in zip(dense.tolist(), trained.module(*inputs).tolist(), strict=True)
        }
    for row in found:
        key = tuple(np.float32(row.features.toArray()).tolist())
        assert row.p == pytest.approx(wanted[key], rel=1e-4, abs=1e-5)


def test_wide_sparse_vectors_give_the_bits_of_dense_ones(reader: Reader, tmp_path: Path) -> None:
    """Without a specification, also where only some rows ask for it; predictions on arrays, too."""
    size, random = 1 << 14, np.random.default_rng(5)
    rows = [
        Vectors.sparse(size, sorted(random.choice(size, n, replace=False)), random.normal(size=n))
        for n in random.integers(0, 7, 24)
    ]
    dense = [Vectors.dense(row.toArray()) for row in rows]
    trainer = Trainer(
        model=partial(nn.Linear, size, 2), loss=nn.CrossEntropyLoss(), engine="local", replicas=1,
        optimizer=partial(torch.optim.SGD, lr=0.5), batch_size=12, stop=max_iteration(4),
    )  # fmt: skip
    fits = [
        trainer.fit(
            reader.spark.createDataFrame(
                [(v, i % 2) for i, v in enumerate(some)], ["features", "label"]
            )
        )
        for some in (dense, rows, [*dense[:12], *rows[12:]])
    ]
    assert [fit.columns for fit in fits] == [{}, *[{"features": Sparse(size)}] * 2]
    for fit in fits[1:]:
        assert fit.history.losses == fits[0].history.losses
        assert torch.equal(fit.module.weight, fits[0].module.weight)
    loaded = load(fits[1].save(tmp_path / "model"), model=partial(nn.Linear, size, 2))
    arrays = reader.spark.createDataFrame(
        [(v.toArray().tolist(),) for v in dense[:3]], ["features"]
    )
    vectors = reader.spark.createDataFrame([(v,) for v in rows[:3]], ["features"])
    wanted = [row.p for row in fits[0].transform(arrays, "p").collect()]
    for data in (arrays, vectors):
        assert [row.p for row in loaded.transform(data, "p").collect()] == wanted
    records = reader.context.parallelize(rows[:3], 1)
    np.testing.assert_allclose(loaded.predict(records).collect(), wanted, rtol=1e-5)


def test_lists_of_lists(reader: Reader, tmp_path: Path) -> None:
    """Documents of sentences, some of them empty: trained as in PyTorch, saved, loaded, used."""
    data = reader.spark.range(40).selectExpr(
        "IF(id % 7 = 0, array(), transform(sequence(1, 1 + int(id % 3)), i -> IF((id + i) % 5 = 0, "
        "array(), transform(sequence(1, 1 + int((id + i) % 4)), j -> int(1 + (i * j) % 9))))) texts",
        "int(id % 2) AS label",
    )
    torch.manual_seed(1)
    trainer = Trainer(
        model=Texts(), loss=nn.CrossEntropyLoss(), features="texts", batch_size=40, replicas=2,
        optimizer=partial(torch.optim.SGD, lr=0.5), stop=max_iteration(5),
        columns={"texts": Sequence(Sequence(), mask=True)},
    )  # fmt: skip
    trained = trainer.fit(data)
    rows = data.collect()
    texts = torch.zeros(40, 3, 4, dtype=torch.long)
    mask = torch.zeros_like(texts)
    for number, row in enumerate(rows):
        for place, words in enumerate(row.texts):
            texts[number, place, : len(words)] = torch.tensor(words)
            mask[number, place, : len(words)] = 1
    as_plainly(trainer, trained, [texts, mask], torch.tensor([row.label for row in rows]))
    loaded = load(trained.save(tmp_path / "model"), model=Texts)
    found = loaded.transform(data, "p").collect()
    with torch.no_grad():
        wanted = {
            str(row.texts): p for row, p in zip(rows, trained.module(texts, mask), strict=True)
        }
    for row in found:
        assert row.p == pytest.approx(wanted[str(row.texts)].tolist(), rel=1e-4)
    found = replace(trainer, columns={"texts": Sequence(mask=True)}).fit(data)
    assert found.history.losses == trained.history.losses
    assert found.columns == trainer.columns
    with pytest.raises(DataError, match=r'"texts", .*: has \d values where row 0 has'):
        replace(trainer, columns={}).fit(data.where("size(texts) > 0"))


def test_labels_that_are_missing(
    reader: Reader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trained, measured, saved and loaded; without the specification the row is named."""
    data = reader.spark.range(60).selectExpr(
        "array(sin(id), cos(id)) AS features",
        "IF(id % 3 = 0, NULL, sin(id)) AS y",
        "IF(id % 4 = 0, double('NaN'), cos(id)) AS z",
    )
    tasks = ["y", "z"]
    trainer = Trainer(
        model=partial(nn.Linear, 2, 2), loss=MaskedLoss(nn.MSELoss()), label=tasks, replicas=2,
        optimizer=partial(torch.optim.SGD, lr=0.5), batch_size=60, stop=max_iteration(40),
    )  # fmt: skip
    trained = trainer.fit(data)
    named = replace(trainer, columns=dict.fromkeys(tasks, Masked())).fit(data)
    assert named.history.losses == trained.history.losses
    assert caplog.messages == []
    classes = data.selectExpr("features", "bigint(y > 0) AS y")
    changes = {"loss": nn.CrossEntropyLoss(), "label": "y", "stop": max_iteration(1)}
    replace(trainer, **changes).fit(classes)
    assert any(
        "is null" in line and "leaves missing labels out" in line for line in caplog.messages
    )
    assert trained.history.losses[-1] < 1e-4 < trained.history.losses[0]
    metrics = [
        MetricOf("mae", label=task, output=partial(torch.select, dim=1, index=i))
        for i, task in enumerate(tasks)
    ]
    loaded = load(trained.save(tmp_path / "model"), model=partial(nn.Linear, 2, 2))
    for model in (trained, loaded):
        found = model.evaluate(data, metrics=metrics)
        assert max(found["y/mae"], found["z/mae"]) < 1e-2
    assert loaded.columns == dict.fromkeys(tasks, Masked())
    assert loaded.transform(data.select("features")).count() == 60
    other = replace(trainer, loss=lambda x, y: (x - torch.stack(y, 1)).square().mean())
    with pytest.raises(DataError, match=r'column "y", row \d+ of partition \d+: is null.*Masked'):
        other.fit(data)
    with pytest.raises(ModelError, match=r"Labels are missing.*MaskedLoss\(loss\) does"):
        replace(other, columns=dict.fromkeys(tasks, Masked())).fit(data)
    with pytest.raises(
        DataError, match=r'no row has a label: "y" and "z" are missing in all 60 rows'
    ):
        trainer.fit(data.selectExpr("features", "double(null) AS y", "double('NaN') AS z"))


# A column type that nothing but its own class knows


def test_a_type_of_a_user_on_executors(reader: Reader) -> None:
    """Executors rebuild its class from the pickle, as that of a notebook."""
    data = reader.spark.range(256).selectExpr("lower(lpad(hex(id), 4, '0')) AS code")
    specs = {"code": Hex()}
    samples = reader.samples(data, ["code"], columns=specs, here=False)
    assert samples.fields == (Field("code", "uint8", (2,)),)
    (found,) = reader.rows(samples)
    assert sorted(found.tolist()) == [[0, i] for i in range(256)]
    assert same(samples, reader.samples(data.repartition(3), ["code"], columns=specs))
    trained = TrainedModel(
        module=nn.Identity(),
        model=nn.Identity(),
        loss=None,
        features=("code",),
        label=(),
        fields=samples.fields,
        num_features=1,
        float_dtype="float32",
        output=Output((2,), "uint8"),
        history=History(),
        columns=specs,
    )
    codes = data.where("code = '0007'")
    assert [row.prediction for row in trained.transform(codes).collect()] == [[0, 7]]
    predicted = trained.predict(records(reader, ["0007", "ff08"]))
    assert [value.tolist() for value in predicted.collect()] == [[0, 7], [255, 8]]
