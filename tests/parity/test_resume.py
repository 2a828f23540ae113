"""A run that goes on from a checkpoint is the run that never stopped, bit for bit."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from launch import in_turn, soak_but
from mistakes import message_of
from own_optimizers import ScheduleFree
from parity_models import CLASSES, WIDTH, dropped_out
from pyspark import cloudpickle
from remembering import Codes
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau

import sparkdl
import sparkdl.train.placed_samples
from sparkdl.checkpoint.manifest import Manifest
from sparkdl.checkpoint.store import CheckpointStore
from sparkdl.data.partition_reader import close_partitions
from sparkdl.data.samples import SampleSet, Source, materialize_here
from sparkdl.slab.root import SlabConfig, remove_root
from sparkdl.slices.slice_file import StoredSlice, unpack

pytestmark = [pytest.mark.parity, pytest.mark.spark]

ITERATIONS = 20  # 51 rows in batches of 9: six iterations an epoch, the last one short


def everything() -> nn.Module:
    """Random draws, running statistics, a buffer that counts, and buffers of every rule."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        Codes(16),
        nn.Dropout(0.3),
        nn.Linear(16, CLASSES),
    )


class Tables(nn.Module):
    """A sparse embedding of classes of numbers, and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(words).mean(dim=1)))


class Reader(nn.Module):
    """The mean over a sequence, padded with word 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, padding_idx=0)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.table(words).mean(dim=1))))


def shuffled_words(words: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random(len(words)) < 0.3, 1, words)


def steep(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Overflows in fp16 until the loss scale has come down."""
    return 100 * nn.functional.cross_entropy(output, target)


cloudpickle.register_pickle_by_value(sys.modules[__name__])

CASES: dict[str, dict] = {
    "everything": {
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "schedule": partial(OneCycleLR, max_lr=0.05, total_steps=ITERATIONS),
        "clip_norm": 0.5,
        "ema": 0.9,
        "slices": 4,
        "validation": 3,
    },
    "plateau": {
        "model": dropped_out,
        "optimizer": partial(torch.optim.SGD, lr=2.0, momentum=0.9),
        "schedule": partial(ReduceLROnPlateau, factor=0.5, patience=0),
        "schedule_metric": "loss",
        "accumulate": 2,
        "l1": 1e-4,
        "wire": "bf16",
        "validation": 2,
    },
    "fp16": {
        "loss": steep,
        "precision": "fp16",
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "schedule": partial(CosineAnnealingLR, T_max=5),
    },
    "local steps": {
        "optimizer": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
        "model": dropped_out,
        "local_steps": 2,
        "ema": 0.8,
    },
    "sparse tables and two optimizers": {
        "model": Tables,
        "features": "words",
        "optimizer": {
            "table": partial(torch.optim.SparseAdam, lr=0.05),
            "": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        },
        "schedule": partial(CosineAnnealingLR, T_max=ITERATIONS),
        "schedule_per": "epoch",
        "slices": 2,
    },
    "schedule-free": {
        "optimizer": partial(ScheduleFree, lr=0.3),
        "schedule": partial(CosineAnnealingLR, T_max=5),
        "ema": 0.8,
        "slices": 3,
        "validation": 2,
    },
    "whole tensors": {
        "optimizer": partial(torch.optim.Adafactor, lr=0.05),
        "clip_value": 0.1,
        "slices": 2,
    },
    "top-k": {
        "model": dropped_out,
        "compression": sparkdl.TopK(0.05),
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "wire": "bf16",
        "slices": 2,
    },
    "PowerSGD": {"compression": sparkdl.PowerSGD(1), "optimizer": partial(torch.optim.SGD, lr=0.1)},
    "augment and bucketing": {
        "model": Reader,
        "features": "text",
        "columns": {"text": sparkdl.Sequence()},
        "augment": shuffled_words,
        "bucketing": 12,
        "sampling": sparkdl.Balanced("label"),
        "class_weights": [1.0, 2.0, 0.5],
        "optimizer": partial(torch.optim.Adagrad, lr=0.1),
    },
}


@pytest.fixture(scope="module")
def df(spark):
    """51 rows in three uneven partitions."""
    generator = np.random.default_rng(4)

    def row() -> tuple:
        words = generator.integers(1, 20, size=5).tolist()
        text = generator.integers(1, 20, size=int(generator.integers(1, 9))).tolist()
        features = generator.normal(size=WIDTH).tolist()
        return features, words, text, int(generator.integers(CLASSES))

    parts = [[row() for _ in range(size)] for size in (20, 13, 18)]
    records = spark.sparkContext.parallelize(parts, 3).flatMap(list)
    schema = "features array<float>, words array<long>, text array<long>, label long"
    return spark.createDataFrame(records, schema)


@pytest.fixture(scope="module", autouse=True)
def read_once(spark) -> Iterator[None]:
    """The local engine is handed partitions that were read already, from slabs of this module."""
    slab = SlabConfig.new("auto", spark.sparkContext.applicationId)
    made: dict[object, SampleSet] = {}
    kept: list[object] = []  # so that no two DataFrames have one id

    def read(source: Source) -> SampleSet:
        key = (
            id(source.data),
            source.features,
            source.replicas,
            source.float_dtype,
            source.sampling,
        )
        if key not in made:
            kept.append(source.data)
            made[key] = materialize_here(replace(source, slab=slab))
        return made[key]

    with mock.patch.object(sparkdl.train.placed_samples, "materialize_here", read):
        yield
    close_partitions()
    remove_root(slab)


def trainer_of(case: str, data, folder: Path, every: int = 1, **changes) -> sparkdl.Trainer:
    values = {
        "model": everything,
        "loss": nn.CrossEntropyLoss(),
        "batch_size": 9,
        "replicas": 3,
        "engine": "local",
        "stop": sparkdl.max_iteration(ITERATIONS),
        "seed": 5,
        "checkpoint": sparkdl.Checkpoint(folder, every=sparkdl.every(every), keep=None),
        **CASES[case],
        **changes,
    }
    if isinstance(values.get("validation"), int):
        often = sparkdl.every(values["validation"])
        metrics = ["accuracy"] if case == "everything" else []
        values["validation"] = sparkdl.Validation(data, metrics, every=often, best="loss")
    return sparkdl.Trainer(**values)


@dataclass(frozen=True)
class Ended:
    """All that a run leaves: results, history, and its last checkpoint."""

    trained: sparkdl.TrainedModel
    uri: str
    manifest: Manifest

    @staticmethod
    def of(trained: sparkdl.TrainedModel, folder: Path) -> Ended:
        uri, manifest = next(iter(CheckpointStore(folder).candidates()))
        assert manifest.iteration == ITERATIONS
        return Ended(trained, uri, manifest)

    def parts(self, best: bool = False) -> list[StoredSlice]:
        files = self.manifest.files if not best else self.manifest.best.files
        return [unpack(Path(self.uri, file.name).read_bytes()) for file in files]


def assert_same_value(one: object, other: object, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes(), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_value(one[key], other[key], f"{where}.{key}")
    else:
        assert one == other, where


def assert_same_weights(one: sparkdl.TrainedModel, other: sparkdl.TrainedModel) -> None:
    """Compare the models, their moving averages and the best ones."""
    for left, right in ((one, other), (one.ema, other.ema), (one.best, other.best)):
        assert (left is None) == (right is None)
        if left is not None:
            assert_same_value(left.module.state_dict(), right.module.state_dict(), "module")


def assert_same_end(one: Ended, other: Ended, cut_alike: bool = True) -> None:
    assert_same_weights(one.trained, other.trained)
    for left, right in zip(one.trained.history, other.trained.history, strict=True):
        for record in (left, right):
            del record["seconds"], record["timings"]
        assert left == right
    assert one.trained.history.validations == other.trained.history.validations
    left, right = one.manifest, other.manifest
    for a, b in zip(left.residuals, right.residuals, strict=True):
        assert (a.replica, a.nbytes, a.checksum) == (b.replica, b.nbytes, b.checksum)
    names = ("iteration", "epoch", "position", "samples", "loss_scale", "skipped", "validations")
    for name in (*names, "extra", "layout", "data", "replicas", "optimizers"):
        assert getattr(left, name) == getattr(right, name), name
    if left.best is not None:
        assert replace(left.best, files=()) == replace(right.best, files=())
    if cut_alike:
        for best in (False, True) if left.best else (False,):
            for a, b in zip(one.parts(best), other.parts(best), strict=True):
                assert (a.start, a.stop, a.trainable_length) == (
                    b.start,
                    b.stop,
                    b.trainable_length,
                )
                assert_same_value(vars(a.state), vars(b.state), f"slice at {a.start}")


@pytest.fixture(scope="module")
def straight(df, tmp_path_factory):
    """The run that never stopped, with a checkpoint after every iteration; made once a case."""
    made: dict[str, tuple[Ended, Path]] = {}

    def get(case: str) -> tuple[Ended, Path]:
        if case not in made:
            folder = tmp_path_factory.mktemp("straight")
            made[case] = Ended.of(trainer_of(case, df, folder).fit(df), folder), folder
        return made[case]

    return get


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("iteration-*"))


FROM = [5, 6, 13]
"""Before, at and after the end of an epoch, which is six iterations."""
SPARED = ["fp16", "plateau", "augment and bucketing", "whole tensors"]


@pytest.mark.parametrize(
    ("case", "number"),
    [*(("everything", number) for number in FROM), *in_turn([*CASES][1:], FROM, SPARED)],
)
def test_from_any_iteration(df, straight, tmp_path, case, number):
    expected, folder = straight(case)
    found = checkpoints(folder)
    assert [int(path.name.split("-")[1]) for path in found] == list(range(1, ITERATIONS + 1))
    trainer = trainer_of(case, df, tmp_path, every=ITERATIONS)
    resumed = trainer.fit(df, resume=found[number - 1])
    assert_same_end(expected, Ended.of(resumed, tmp_path))


def test_the_model_of_a_checkpoint_is_that_of_the_run(straight):
    """Its weights are those of ``eval()``, where the state has those of ``train()`` too."""
    expected, _ = straight("schedule-free")
    loaded = sparkdl.load(expected.uri, model=everything)
    assert_same_weights(loaded, expected.trained)


def test_the_cases_are_what_they_say(straight):
    """Scales moved, learning rates fell, validations were made: else the tests above are empty."""
    scaled, _ = straight("fp16")
    assert 0 < scaled.manifest.skipped < ITERATIONS
    assert scaled.manifest.loss_scale < 2**16
    assert scaled.manifest.extra["loss_scale_age"] > 0
    rates = [record["learning_rate"] for record in straight("plateau")[0].trained.history]
    assert len(set(rates)) > 2
    for case in ("everything", "plateau"):
        ended, _ = straight(case)
        assert ended.manifest.best.iteration > 0
        assert len(ended.manifest.validations) == ITERATIONS // CASES[case]["validation"]


def test_residuals_are_part_of_a_checkpoint(df, straight, tmp_path, caplog):
    """Else the runs above that went on from them would show nothing."""
    expected, folder = straight("top-k")
    path = checkpoints(folder)[7]
    assert [file.replica for file in expected.manifest.residuals] == [0, 1, 2]
    again = trainer_of("top-k", df, tmp_path, every=ITERATIONS)
    for any_data in (False, True):
        resumed = again.fit(df, resume=path, any_data=any_data)
        assert caplog.messages == []
        assert resumed.history.losses == expected.trained.history.losses
    other = sparkdl.TopK(0.06)
    for here, kind in (({"compression": other}, other), ({"compression": None}, None)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "sparkdl"):
            another = trainer_of("top-k", df, tmp_path, checkpoint=None, **here)
            trained = another.fit(df, resume=path)
        (message,) = caplog.messages
        assert message.startswith(f"compression is {kind} and was TopK(ratio=0.05, error_feedback=")
        assert trained.history.losses[8] == expected.trained.history.losses[8]
        assert trained.history.losses != expected.trained.history.losses


STOPS = {
    "at an iteration": ("everything", sparkdl.max_iteration(7)),
    "between epochs": ("whole tensors", sparkdl.max_iteration(10) & sparkdl.every_epoch()),
    "at some multiple": ("whole tensors", sparkdl.every(8)),
    "at a moment": ("whole tensors", sparkdl.every_seconds(1e-9)),
    "or later": ("whole tensors", sparkdl.max_epoch(1) | sparkdl.every(50)),
}


@pytest.mark.parametrize(("case", "stop"), STOPS.values(), ids=STOPS)
def test_a_run_that_has_ended_does_not_go_on(df, tmp_path, case, stop):
    """Also where the stop is true at a moment only, between an iteration and the one before."""
    trainer = trainer_of(case, df, tmp_path, stop=stop)
    ended = trainer.fit(df)
    again = trainer.fit(df, resume="latest")
    assert again.history.losses == ended.history.losses
    assert_same_weights(ended, again)


@dataclass(frozen=True)
class RateIs(sparkdl.Trigger):
    rate: float

    def __call__(self, previous: sparkdl.TrainState, current: sparkdl.TrainState) -> bool:
        return current.learning_rates == (self.rate,)


def test_triggers_see_the_rate_with_which_it_ended(df, tmp_path):
    stop, sgd = RateIs(0.25), partial(torch.optim.SGD, lr=1.0)
    halved = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    trainer = trainer_of("whole tensors", df, tmp_path, stop=stop, optimizer=sgd, schedule=halved)
    assert len(trainer.fit(df).history) == len(trainer.fit(df, resume="latest").history)


@pytest.mark.parametrize(
    ("case", "slices"),
    [
        ("whole tensors", 7),
        ("sparse tables and two optimizers", 7),
        ("top-k", 1),
        ("schedule-free", 7),
    ],
)
def test_cut_anew(df, straight, tmp_path, case, slices):
    expected, folder = straight(case)
    path = checkpoints(folder)[7]
    trainer = trainer_of(case, df, tmp_path, every=ITERATIONS, slices=slices)
    resumed = Ended.of(trainer.fit(df, resume=path), tmp_path)
    assert resumed.manifest.slices == slices
    assert_same_end(expected, resumed, cut_alike=False)


@pytest.mark.parametrize(
    "case", soak_but(["everything"], ["everything", "sparse tables and two optimizers", "PowerSGD"])
)
def test_engines_change_places(df, straight, tmp_path, case):
    """local to 6, shuffle to 13, local to 20."""
    expected, folder = straight(case)
    path = checkpoints(folder)[5]
    between = trainer_of(
        case, df, tmp_path / "shuffle", every=13, engine="shuffle", stop=sparkdl.max_iteration(13)
    )
    assert len(between.fit(df, resume=path).history) == 13
    last = trainer_of(case, df, tmp_path / "local", every=ITERATIONS)
    resumed = last.fit(df, resume=tmp_path / "shuffle")
    assert_same_end(expected, Ended.of(resumed, tmp_path / "local"))


def test_the_checkpoint_says_how_many_replicas(df, straight, tmp_path):
    expected, folder = straight("everything")
    path = checkpoints(folder)[9]
    trainer = trainer_of("everything", df, tmp_path, every=ITERATIONS, replicas=None)
    assert df.sparkSession.sparkContext.defaultParallelism != 3
    assert_same_end(expected, Ended.of(trainer.fit(df, resume=path), tmp_path))


@pytest.mark.soak
def test_latest_goes_on_again_and_again(df, straight, tmp_path):
    """Some iterations at a time, in one folder, which is empty at first."""
    expected, _ = straight("everything")
    for stop in (7, 14, ITERATIONS):
        trainer = trainer_of("everything", df, tmp_path, stop=sparkdl.max_iteration(stop))
        trained = trainer.fit(df, resume="latest")
        assert len(trained.history) == stop
    assert_same_end(expected, Ended.of(trained, tmp_path))


# What differs, and what is damaged


def refusal(df, resume, trainer: sparkdl.Trainer, **how) -> str:
    return message_of(sparkdl.ParameterError, trainer.fit, df, resume=resume, **how)


@pytest.mark.soak
def test_frozen_parameters_are_those_of_the_run_before(df, tmp_path):
    """They are in no checkpoint: a run that began with a model that was fitted needs it again."""
    first = replace(trainer_of("plateau", df, tmp_path / "first"), checkpoint=None).fit(df)
    tuned = trainer_of("plateau", df, tmp_path / "tuned", freeze=["0"], validation=None)
    tuned = replace(tuned, schedule=None, schedule_metric=None)
    whole = tuned.fit(df, start=first)
    path = checkpoints(tmp_path / "tuned")[3]
    assert refusal(df, path, tuned) == (
        f"the checkpoint {path} belongs to another run: the parameters that are frozen hold other "
        "values here, and a checkpoint contains only trained parameters: start with the same "
        "values, for example weights=start.module.state_dict() if the run began with "
        "fit(start=start). Use what it was made with, or fit without resume= (in another folder)."
    )
    resumed = replace(tuned, weights=first.module.state_dict()).fit(df, resume=path)
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, resumed.module.state_dict()[name]), name


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def test_what_resume_cannot_be(df, straight, tmp_path):
    trained = straight("whole tensors")[0].trained
    trainer = trainer_of("whole tensors", df, tmp_path / "mine")
    assert refusal(df, "latest", trainer, start=trained) == (
        "resume= and start= cannot be combined: a resumed run has its own weights. Pass one of "
        "them."
    )


def flip(folder: Path, names: str) -> Path:
    path = sorted(folder.glob(names))[0]
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("engine", "names"),
    soak_but(
        [("local", "slice-00001-*")], [("local", "slice-00001-*"), ("shuffle", "best-00000-*")]
    ),
)
def test_the_one_before_a_damaged_one_is_taken(df, straight, tmp_path, caplog, engine, names):
    """Also where that is found only when states are read."""
    expected, folder = straight("everything")
    for path in checkpoints(folder)[6:8]:
        newest = Path(shutil.copytree(path, tmp_path / path.name))
    damaged, starts = flip(newest, names), Starts()
    how = {"every": ITERATIONS, "engine": engine, "callbacks": [starts]}
    trainer = trainer_of("everything", df, tmp_path, **how)
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        resumed = trainer.fit(df, resume="latest")
    assert starts.iterations == [7]
    (warning,) = [r.getMessage() for r in caplog.records if "is skipped" in r.getMessage()]
    assert warning == (
        f"checkpoint {newest} is skipped: {newest}: {damaged.name}: its bytes were changed (its "
        "checksum differs)"
    )
    assert_same_end(expected, Ended.of(resumed, tmp_path))


class Starts(sparkdl.Callback):
    """Where runs began."""

    def __init__(self) -> None:
        self.iterations: list[int] = []

    def on_fit_start(self, trainer, state) -> None:
        self.iterations.append(state.iteration)


def test_latest_begins_anew_where_none_was_ever_complete(df, straight, tmp_path, caplog):
    """The driver was killed in its first checkpoint: starting again must just work."""
    expected, folder = straight("whole tensors")
    first = Path(shutil.copytree(checkpoints(folder)[0], tmp_path / "iteration-x"))
    first = first.rename(tmp_path / checkpoints(folder)[0].name)
    (first / "manifest.json").unlink()
    trainer = trainer_of("whole tensors", df, tmp_path, every=ITERATIONS)
    with caplog.at_level(logging.WARNING, logger="sparkdl"):
        resumed = trainer.fit(df, resume="latest")
    assert any("never completed" in record.getMessage() for record in caplog.records)
    assert_same_end(expected, Ended.of(resumed, tmp_path))
    assert not first.exists()  # pruned with the first one that is complete


# What may differ


def test_best_by_another_metric_begins_anew(df, straight, tmp_path):
    """The weights that were kept are the best by the loss: of no use for the accuracy."""
    path = checkpoints(straight("everything")[1])[12]
    often = sparkdl.every(3)
    validation = sparkdl.Validation(df, ["accuracy"], every=often, best="accuracy")
    trainer = trainer_of("everything", df, tmp_path, every=ITERATIONS, validation=validation)
    ended = Ended.of(trainer.fit(df, resume=path), tmp_path)
    assert ended.manifest.best.metric == "accuracy"
    assert ended.manifest.best.iteration in (15, 18)
    assert ended.trained.best is not None
    unvalidated = replace(trainer, stop=sparkdl.max_iteration(14), checkpoint=None)
    assert unvalidated.fit(df, resume=path).best is None


def test_another_precision_has_a_scale_of_its_own(df, straight, tmp_path):
    path = checkpoints(straight("fp16")[1])[9]
    full = trainer_of("fp16", df, tmp_path / "fp32", every=ITERATIONS, precision="fp32")
    trained = full.fit(df, resume=path)
    assert {record["loss_scale"] for record in list(trained.history)[10:]} == {1.0}
    back = replace(full, precision="fp16", stop=sparkdl.max_iteration(21), checkpoint=None)
    (*_, last) = back.fit(df, resume=tmp_path / "fp32").history
    assert last["loss_scale"] >= 2**15
