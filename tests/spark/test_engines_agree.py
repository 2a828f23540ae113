"""Every feature of an iteration gives the same bits on the shuffle engine as in one process."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from launch import in_turn, soak_but
from noisy import Noisy
from own_optimizers import ScheduleFree
from pyspark import cloudpickle
from remembering import Codes
from structured import ModelOutput
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import sparkdl
from sparkdl.engines.local.engine import LocalEngine
from sparkdl.engines.shuffle import forms
from sparkdl.engines.shuffle.engine import ShuffleEngine
from sparkdl.engines.shuffle.forms import OneStage

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[ModelOutput.__module__])
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

WIDTH, CLASSES, NAMES = 6, 3, 40
SCHEDULE_FREE = partial(ScheduleFree, lr=0.5)
IGNORING = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]), ignore_index=2)
SCHEMA = "features array<double>, tags array<long>, words array<long>, label long, weight double"


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def remembering() -> nn.Module:
    return nn.Sequential(Codes(WIDTH), smooth())


class Tagged(nn.Module):
    """A sparse table, which three slices cut."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = nn.EmbeddingBag(NAMES, 5, sparse=True)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, tags):
        return self.out(torch.tanh(self.tags(tags)))


class Words(nn.Module):
    """Sequences of any length, and their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NAMES, 5, padding_idx=0)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, words, lengths):
        return self.out(torch.tanh(self.words(words).sum(1) / lengths[:, None]))


class Packed(nn.Module):
    """Recurrent over packed sequences, beside the padded ones: both must be as long."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NAMES, 5, padding_idx=0)
        self.cells, self.out = nn.GRU(5, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, words, lengths):
        words = self.words(words)
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        read, _ = pad_packed_sequence(self.cells(packed)[0], batch_first=True)
        return self.out((read + words).sum(1) / lengths[:, None])


class Named(nn.Module):
    """Its inputs come by keyword, and it returns more than its output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(NAMES, 5, padding_idx=0), nn.LayerNorm(5 + WIDTH)
        self.out = nn.Linear(5 + WIDTH, CLASSES)

    def forward(self, *, words_lengths, x, words):
        summed = self.words(words).sum(1) / words_lengths[:, None]
        hidden = torch.tanh(self.norm(torch.cat([x, summed], 1)))
        return ModelOutput(self.out(hidden), hidden)


class Amplified(nn.Module):
    """Its scaled gradient overflows fp16 in the first iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.layer(x) * 8.0


class Large(nn.Module):
    """Large enough that replicas compute with weights where they lie; it writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(WIDTH, 1024), nn.BatchNorm1d(1024)
        self.layer, self.out = nn.Linear(1024, 1024), nn.Linear(1024, CLASSES)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.data.clamp_(-0.02, 0.02)
        return self.out(torch.tanh(self.layer(self.norm(self.wide(x)))))


class Many(nn.Module):
    """Parametrizations, a compiled part, a cache that grows with the batch, an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, 8))
        self.second = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.out = torch.compile(nn.Linear(8, CLASSES), backend="eager", dynamic=False)
        self.register_buffer("rows", torch.arange(2), persistent=False)
        self.register_buffer("mean", torch.zeros(1).expand(8))

    def forward(self, x):
        if len(self.rows) < len(x):
            self.rows = torch.arange(len(x))
        hidden = torch.tanh(self.first(x)) * (1 + self.rows[: len(x), None] / 100)
        if self.training:
            self.mean = self.mean.lerp(hidden.detach().mean(0), 0.1)
        return self.out(self.second(hidden) - self.mean)


class Fragile(nn.Module):
    """Its gradient is NaN where a number of the batch is above 2.2, which few are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        output = self.layer(x)
        if output.requires_grad and bool((x > 2.2).any()):
            output.register_hook(_spoil)
        return output


def _spoil(gradient):
    return gradient * float("nan")


def sparse_and_dense(module):
    return [
        torch.optim.SparseAdam([module.tags.weight], lr=1e-2),
        torch.optim.Adam(module.out.parameters(), lr=1e-2),
    ]


def half_at_random(bucket):
    """A hook of a user's own, with a state."""
    flat = bucket.gradient.reshape(-1)
    chosen = torch.randperm(len(flat), generator=torch.Generator().manual_seed(bucket.seed))
    chosen = chosen[: -(-len(flat) // 2)]
    calls = bucket.state.get("calls", torch.zeros(1, dtype=torch.int64))
    calls += 1
    return {"values": flat[chosen], "indices": chosen, "calls": calls}


def jitter_by_name(x, words, rng):
    return {"words": words[::-1], "x": jitter(x, rng)}


def counted(output, target):
    """A sum over the classes but the last, and how many they are."""
    each = nn.functional.cross_entropy(output, target, ignore_index=2, reduction="none")
    return each.sum(), (target != 2).sum()


def jitter(features, rng):
    return features + rng.normal(scale=0.1, size=features.shape).astype(features.dtype)


def draws(features, rng):
    """From the generators of the process, as libraries of transforms do."""
    noise = torch.randn(features.shape).numpy() * np.random.rand() * random.random()
    return features + 0.1 * noise.astype(features.dtype)


CASES = {
    "plain": {},
    "written to": {"model": Large, "slices": 3},
    "written to, frozen, clip_norm": {"model": Large, "freeze": ["wide"], "clip_norm": 0.3},
    "clip_norm, N != M": {"clip_norm": 0.3, "slices": 3},
    "clip_norm, N == M": {"clip_norm": 0.3, "slices": 2},
    "clip_norm, N == 1": {"clip_norm": 0.3, "slices": 1},
    "clip_value": {"clip_value": 0.02, "clip_norm": 0.1, "histograms": sparkdl.every(2)},
    "accumulate": {"accumulate": 3, "model": smooth},
    "local_steps": {"local_steps": 2, "clip_norm": 0.5, "model": smooth},
    "regularisers": {"l1": 0.01, "l2": {"*.weight": 0.1}},
    "tables": {
        "model": Tagged,
        "features": "tags",
        "optimizer": sparse_and_dense,
        "histograms": sparkdl.every(2),
    },
    "tables, clip_norm": {
        "model": Tagged,
        "features": "tags",
        "optimizer": sparse_and_dense,
        "clip_norm": 0.05,
        "wire": "bf16",
    },
    "buffers that follow rules, clip_norm": {
        "model": remembering,
        "buffers": {"0.silent": lambda values: values[-1]},
        "clip_norm": 0.3,
        "slices": 3,
    },
    "wire bf16": {"wire": "bf16"},
    "wire fp16": {"wire": "fp16", "clip_norm": 0.3},
    "compression top-k, clip_norm": {
        "compression": sparkdl.TopK(0.1),
        "clip_norm": 0.3,
        "slices": 2,
        "model": smooth,
        "batch_size": 2,  # in some iterations a replica has no rows
    },
    "compression PowerSGD": {"compression": sparkdl.PowerSGD(2), "wire": "bf16"},
    "compression, tables": {
        "model": Tagged,
        "features": "tags",
        "optimizer": sparse_and_dense,
        "compression": sparkdl.PowerSGD(1),
    },
    "skip, compression": {"on_nan": "skip", "model": Fragile, "compression": half_at_random},
    "precision bf16": {"precision": "bf16"},
    "precision fp16": {"precision": "fp16", "model": Amplified},
    "skip": {"on_nan": "skip", "model": Fragile},
    "skip, clip_norm": {"on_nan": "skip", "model": Fragile, "clip_norm": 0.3},
    "ema": {"ema": 0.9, "clip_norm": 0.3},
    "ema, local_steps": {"ema": 0.9, "local_steps": 2, "model": smooth},
    "schedule-free": {"optimizer": SCHEDULE_FREE, "ema": 0.5, "clip_norm": 0.3},
    "schedule-free, local_steps": {"optimizer": SCHEDULE_FREE, "local_steps": 2, "model": smooth},
    "weights": {"weight": "weight", "class_weights": [0.5, 2.0, 1.0]},
    "sampling": {"sampling": sparkdl.Balanced("label"), "class_weights": "balanced"},
    "sampling, weights": {"sampling": sparkdl.Weighted("weight", False, 20), "weight": "weight"},
    "labels that the loss ignores and weighs": {"loss": IGNORING, "batch_size": 3, "model": smooth},
    "a sum and its count, clip_norm": {
        "loss": counted,
        "batch_size": 3,
        "model": smooth,
        "clip_norm": 0.3,
    },
    "a sum and its count, accumulate": {"loss": counted, "model": smooth, "accumulate": 3},
    "a sum and its count, local_steps": {"loss": counted, "model": smooth, "local_steps": 2},
    "augment": {"augment": jitter},
    "augment that draws, modules of many kinds": {"augment": draws, "model": Many},
    "sequences": {
        "model": Words,
        "features": "words",
        "columns": {"words": sparkdl.Sequence(lengths=True)},
        "bucketing": 16,
    },
    "packed sequences, accumulate": {
        "model": Packed,
        "features": "words",
        "columns": {"words": sparkdl.Sequence(lengths=True)},
        "accumulate": 3,
    },
    "inputs by keyword, an output of several fields": {
        "model": Named,
        "features": {"words": "words", "x": "features"},
        "columns": {"words": sparkdl.Sequence(lengths=True)},
        "output": "logits",
        "augment": jitter_by_name,
        "weight": "weight",
        "accumulate": 2,
    },
    "draws": {"optimizer": partial(Noisy, lr=0.1), "slices": 1},
    "draws, local_steps": {
        "optimizer": partial(Noisy, lr=0.1),
        "slices": 1,
        "local_steps": 2,
        "model": smooth,
    },
    "care": {
        "freeze": ["0"],
        "unfreeze": ["0.bias"],
        "activation_checkpointing": ["4"],
        "compile": {"backend": "eager", "dynamic": False},  # again for each size of a batch
        "histograms": sparkdl.every(3),
    },
}


SPARED = [
    *("plain", "skip", "tables", "ema"),  # by number of stages
    *("clip_value", "precision fp16", "sampling, weights", "written to, frozen, clip_norm"),
    *("labels that the loss ignores and weighs", "draws, local_steps"),
    *("local_steps", "care", "draws"),  # in a gang, or with another feature
    *("written to", "clip_norm, N != M", "clip_norm, N == 1", "accumulate", "wire bf16"),
    *("compression PowerSGD", "skip, clip_norm", "precision bf16", "augment", "sequences"),
    *("a sum and its count, clip_norm", "a sum and its count, local_steps"),
    *(
        "sampling",
        "regularisers",
        "weights",
        "wire fp16",
        "compression, tables",
        "clip_norm, N == M",
    ),
    *("skip, compression", "a sum and its count, accumulate", "schedule-free, local_steps"),
    *("ema, local_steps", "inputs by keyword, an output of several fields"),
]
"""Tried in another test, or part of another case: they soak here."""
SPARED_IN_A_GANG = [
    *("plain", "tables", "tables, clip_norm", "compression PowerSGD", "skip", "skip, clip_norm"),
    *("augment", "clip_value", "accumulate", "weights", "regularisers", "draws", "care"),
    *("sampling, weights", "sequences", "ema", "precision bf16", "clip_norm, N == M"),
    *("labels that the loss ignores and weighs", "skip, compression"),
    *("packed sequences, accumulate", "compression, tables"),
]


def in_ci(cases, others, spared):
    """Return the cases in turn with ``others``; those that are spared soak with all of them."""
    quick = in_turn([case for case in cases if case not in spared], others)
    soak = [(case, other) for case in cases if case in spared for other in others]
    return quick + [pytest.param(*row, marks=pytest.mark.soak) for row in soak]


@pytest.fixture(scope="module")
def frames(spark):
    """Training and validation rows in two uneven partitions each, one of them small."""

    def make(sizes, seed):
        generator = np.random.default_rng(seed)
        parts = [[_row(generator) for _ in range(size)] for size in sizes]
        rdd = spark.sparkContext.parallelize(parts, len(parts)).flatMap(list)
        df = spark.createDataFrame(rdd, SCHEMA).cache()
        df.count()
        return df

    made = make((28, 12), 1), make((9, 0), 2)
    yield made
    for df in made:
        df.unpersist()


def _row(generator):
    return (
        generator.normal(size=WIDTH).tolist(),
        generator.integers(0, NAMES, size=4).tolist(),
        generator.integers(1, NAMES, size=generator.integers(1, 9)).tolist(),
        int(generator.integers(CLASSES)),
        float(generator.gamma(2.0) * (generator.random() > 0.2)),
    )


class Notes(sparkdl.Callback):
    def __init__(self) -> None:
        self.states: list[sparkdl.TrainState] = []

    def on_iteration_end(self, trainer, state):
        self.states.append(state)


def trainer_of(changes, validation) -> sparkdl.Trainer:
    values = {
        "model": model,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "batch_size": 10,
        "replicas": 2,
        "slices": 3,
        "stop": sparkdl.max_iteration(6),
        "seed": 5,
        "validation": sparkdl.Validation(
            validation, metrics=["accuracy"], every=sparkdl.every(3), best="loss"
        ),
    }
    return sparkdl.Trainer(**{**values, **changes})


@pytest.fixture(scope="module")
def alone(frames):
    """``alone(case, **changes)``: its trainer, and what that makes in one process: trained once."""
    df, validation = frames
    known = {}

    def of(case, **changes):
        key = case, *changes.items()
        if key not in known:
            trainer = trainer_of({**CASES[case], **changes}, validation)
            known[key] = trainer, run(trainer, df, "local")
        return known[key]

    return of


def run(trainer, df, engine):
    notes = Notes()
    trained = replace(trainer, engine=engine, callbacks=[notes]).fit(df)
    return trained, notes.states


@pytest.mark.parametrize(
    ("case", "stages"),
    in_turn(
        ["plain", "skip", "local_steps", "tables", "ema", "care", "draws"],
        ["one", "auto", "two", "shuffle"],
        spared=["local_steps", "care", "draws"],
    ),
)
def test_same_bits_in_any_number_of_stages(frames, alone, monkeypatch, set_stages, case, stages):
    """``auto``: the first three updates are measured, so that a run has both."""
    monkeypatch.setattr(forms, "STAGE_SECONDS", 1e9)
    set_stages(stages)
    at_once = mock.Mock(wraps=OneStage.submit)
    monkeypatch.setattr(OneStage, "submit", lambda *args: at_once(*args))
    trainer, here = alone(case, **({"clip_norm": None} if "clip_norm" in CASES[case] else {}))
    there = run(trainer, frames[0], "shuffle")
    _compare(case, trainer, here, there)
    skips = [0, *[state.skipped for state in there[1]]]
    made = [i for i, (a, b) in enumerate(itertools.pairwise(skips), 1) if a == b]
    without = {"shuffle": 6, "two": 6, "one": 0, "auto": [*made, 6, 6, 6][2]}[stages]
    histograms = trainer.histograms.iterations if trainer.histograms is not None else 7
    expected = [i for i in range(without + 1, 7) if i % histograms]
    assert at_once.call_count == len(expected)


@pytest.mark.parametrize(("case", "stages"), in_ci(CASES, ["shuffle", "auto"], SPARED))
def test_same_bits(frames, alone, set_stages, case, stages):
    """With references that travel through a shuffle, as between nodes, or through the driver."""
    set_stages(stages)
    trainer, here = alone(case)
    _compare(case, trainer, here, run(trainer, frames[0], "shuffle"))


@pytest.mark.parametrize(
    ("case", "fits"), soak_but([("plain", True)], [("plain", True), ("clip_norm, N != M", False)])
)
def test_what_is_too_much_to_be_told_goes_through_a_shuffle(
    frames, alone, monkeypatch, set_stages, case, fits
):
    """An iteration whose second half cannot be told is computed again; later ones are not tried."""
    asked = []

    def too_large(message):
        asked.append(message.pending is not None)
        return asked[-1] or not fits

    monkeypatch.setattr(forms, "_too_large", too_large)
    set_stages("two")
    trainer, here = alone(case)
    _compare(case, trainer, here, run(trainer, frames[0], "shuffle"))
    assert sum(asked) == fits


STRATEGIES = {
    "ddp": ("ddp", 1),
    "ddp in buckets": (sparkdl.DDP(bucket_cap_mb=1e-4), 1),
    "zero1": ("zero1", 2),
}
"""And the slices that others have then."""
NOT_IN_A_GANG = ("local_steps", "wire", "N !=", "N == 1", "written to", "a sum and its count")
"""Wherever a gang's model writes, it writes to the weights themselves, as in plain PyTorch. Sums are
divided by rows before backward there, and by counts after it."""


@pytest.mark.gang
@pytest.mark.parametrize(
    ("case", "strategy"),
    in_ci(
        [name for name in CASES if not any(word in name for word in NOT_IN_A_GANG)],
        list(STRATEGIES),
        SPARED_IN_A_GANG,
    ),
)
def test_a_gang_of_two_gives_the_same_bits(frames, alone, case, strategy):
    """A sum of two has one order."""
    how, slices = STRATEGIES[strategy]
    trainer, here = alone(case, slices=1 if case == "draws" else slices)
    there = run(replace(trainer, strategy=how, slices=None), frames[0], "gang")
    _compare(case, trainer, here, there)


@pytest.mark.gang
@pytest.mark.parametrize(("wire", "digits"), soak_but([("bf16", 8)], [("bf16", 8), ("fp16", 11)]))
def test_a_gang_sums_in_what_travels(frames, wire, digits):
    """Each gradient and each sum is rounded once: half a unit in the last place, twice."""
    df, validation = frames
    rate, steps = 0.1, 6
    changes = {"model": smooth, "optimizer": partial(torch.optim.SGD, lr=rate), "slices": None}
    trainer = trainer_of({**changes, "clip_norm": 10.0}, validation)
    exact, states = run(trainer, df, "gang")
    rounded, _ = run(replace(trainer, wire=wire), df, "gang")
    largest = max(state.gradient_norm for state in states)
    for one, other in zip(exact.module.parameters(), rounded.module.parameters(), strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0, atol=steps * rate * largest * 2.0**-digits)


def _compare(case, trainer, one, other):
    (here, here_states), (there, there_states) = one, other
    for which in ("", "ema", "best"):
        one, other = (getattr(t, which) if which else t for t in (here, there))
        assert (one is None) == (other is None) == (which == "ema" and trainer.ema is None)
        if one is not None:
            _same(one.module, other.module)
    assert len(here_states) == len(there_states) == 6
    for a, b in zip(here_states, there_states, strict=True):
        for name in ("loss", "gradient_norm", "skipped", "loss_scale", "samples", "iteration"):
            assert repr(getattr(a, name)) == repr(getattr(b, name)), (
                name
            )  # NaN where nothing counts
        _same_histograms(a.histograms, b.histograms)
    assert here.history.validations == there.history.validations
    assert len(here.history.validations) == 2
    _shows(case, there_states, there)


def _same(one, other):
    left, right = one.state_dict(), other.state_dict()
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert tensor.numpy().tobytes() == right[name].numpy().tobytes(), name


def _same_histograms(one, other):
    assert (one is None) == (other is None)
    if one is not None:
        assert list(one) == list(other)
        for name, histogram in one.items():
            assert (histogram.counts == other[name].counts).all(), name
            for figure in ("smallest", "largest", "total", "squares"):
                assert getattr(histogram, figure) == getattr(other[name], figure), (name, figure)


def _shows(case, states, trained):
    """The run was one in which the feature had something to do."""
    if "clip_norm" in case:
        skips = [0, *[state.skipped for state in states]]
        for state, before in zip(states, skips, strict=False):
            assert (state.gradient_norm is None) == (state.skipped > before)
        assert any(state.gradient_norm for state in states)
    if case.startswith("skip"):
        assert 0 < states[-1].skipped < 6
    if "modules of many kinds" in case:
        assert trained.module.rows.tolist() == [0, 1]  # as it was built
    if case == "precision fp16":
        assert states[-1].loss_scale < 2.0**16
        assert 0 < states[-1].skipped < 6
    if "histograms" in CASES[case]:
        sizes = {p.numel() for p in trained.module.parameters()}
        found = [s.histograms for s in states if s.histograms]
        assert len(found) == 6 // CASES[case]["histograms"].iterations
        assert {h.counts.sum() for n, h in found[0].items() if n.startswith("weights/")} <= sizes


def test_the_engines_are_two(frames):
    """That the comparison is not of one with itself."""
    df, validation = frames
    told = []

    class Told(sparkdl.Callback):
        def on_iteration_start(self, trainer, state):
            told.append(trainer.engine)

    for engine in ("local", "shuffle"):
        trainer = trainer_of({"stop": sparkdl.max_iteration(1)}, validation)
        replace(trainer, engine=engine, callbacks=[Told()]).fit(df)
    assert told == ["local", "shuffle"]
    assert LocalEngine.run is not ShuffleEngine.run


def test_what_validation_measures_is_what_evaluate_measures(frames):
    df, validation = frames
    trainer = trainer_of({"stop": sparkdl.max_iteration(3)}, validation)
    trained = trainer.fit(df)
    last = trained.history.validations[-1]
    assert last["iteration"] == 3
    evaluated = trained.evaluate(validation, metrics=["accuracy"])
    assert last["metrics"] == pytest.approx(evaluated, rel=1e-6)
    best = min(v["metrics"]["loss"] for v in trained.history.validations)
    assert trained.best.evaluate(validation)["loss"] == pytest.approx(best, rel=1e-6)


class DeletesSamples(sparkdl.Callback):
    """The files of all samples of this application, before the first validation."""

    def __init__(self, application: str) -> None:
        self.application, self.deleted = application, 0

    def on_iteration_end(self, trainer, state):
        for path in Path("/dev/shm").glob(f"sparkdl-{self.application}-*/samples-*"):
            path.unlink()
            self.deleted += 1


@pytest.mark.linux
@pytest.mark.parametrize("engine", soak_but(["shuffle"], ["local", "shuffle"]))
def test_files_that_are_deleted_before_the_first_validation_cost_nothing(spark, frames, engine):
    df, _ = frames  # of whose second part no row is looked at before
    trainer = trainer_of({"stop": sparkdl.max_iteration(4)}, df)
    expected = replace(trainer, engine="local").fit(df)
    deletes = DeletesSamples(spark.sparkContext.applicationId)
    found = replace(trainer, engine=engine, callbacks=[deletes]).fit(df)
    assert deletes.deleted > 2
    assert found.history.losses == expected.history.losses
    assert found.history.validations == expected.history.validations
