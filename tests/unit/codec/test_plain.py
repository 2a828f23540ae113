"""Numbers of NumPy, pandas and torch are as good as Python's, wherever a user gives numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from mistakes import message_of
from torch import nn

import sparkdl
from sparkdl.codec.safe import decode, encode
from sparkdl.plain import plain
from sparkdl.train.prepare import prepare

SCALARS: dict[str, Callable[[Any], Any]] = {
    "NumPy scalar": lambda value: np.asarray(value)[()],
    "NumPy array": np.asarray,
    "tensor": torch.tensor,
    "Series' element": lambda value: pd.Series([value]).iloc[0],
}
PARAMETERS: dict[str, Any] = {
    **dict.fromkeys(("batch_size", "replicas", "slices", "accumulate", "local_steps"), 4),
    **{"min_ranks": 2, "bucketing": 64, "seed": 7},
    **{"clip_value": 0.5, "clip_norm": 2.0, "l1": 0.25, "l2": 0.5, "ema": 0.75},
    **{"strict_weights": False, "keep_optimizer_state": True},
}


def trainer(**values: Any) -> sparkdl.Trainer:
    given: dict[str, Any] = {
        "model": partial(nn.Linear, 2, 3),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD,
    }
    return sparkdl.Trainer(**{**given, **values})


@pytest.mark.parametrize("convert", SCALARS.values(), ids=SCALARS)
def test_numbers_of_a_trainer(convert: Callable[[Any], Any]) -> None:
    for name, value in PARAMETERS.items():
        gang = {"engine": "gang"} if name == "min_ranks" else {}
        found = getattr(trainer(**{name: convert(value)}, **gang), name)
        assert (type(found), found) == (type(value), value), name


WEIGHTS: dict[str, tuple[Any, tuple[float, ...]]] = {
    "array": (np.array([1.0, 2.0, 0.5]), (1.0, 2.0, 0.5)),
    "array of float32": (np.array([1, 2, 0.5], dtype=np.float32), (1.0, 2.0, 0.5)),
    "tensor": (torch.tensor([1.0, 2.0, 0.5]), (1.0, 2.0, 0.5)),
    "list of scalars": ([np.float32(1), torch.tensor(2.0), 0.5], (1.0, 2.0, 0.5)),
    "Series": (pd.Series([1.0, 2.0, 0.5]), (1.0, 2.0, 0.5)),
    "Series by class": (pd.Series({2: 0.5, 1: 2.0}), (1.0, 2.0, 0.5)),
    "counts of float labels": (pd.Series([2.0, 2.0, 1.0]).value_counts(), (1.0, 1.0, 2.0)),
    "keys of NumPy": ({np.int64(2): np.float64(0.5), np.int32(1): 2}, (1.0, 2.0, 0.5)),
    "keys that are tensors": ({torch.tensor(2): 0.5, torch.tensor(1): 2}, (1.0, 2.0, 0.5)),
}


@pytest.mark.parametrize(("given", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_of_classes(given: Any, expected: tuple[float, ...]) -> None:
    assert trainer(class_weights=given).options.class_weights == expected


def test_names_and_mappings_of_a_trainer() -> None:
    table = pd.DataFrame(columns=["a", "b", "y"])
    for names in (table.columns[:2], np.array(["a", "b"]), pd.Series(["a", "b"]), ("a", "b")):
        assert trainer(features=names).feature_columns == ("a", "b")
    assert trainer(label=table.columns[2:]).label_columns == ("y",)
    assert trainer(freeze=np.array(["weight"])).freeze == ["weight"]
    assert trainer(l2=pd.Series({"*.weight": 0.5})).l2 == {"*.weight": 0.5}
    made = trainer(engine="gang", replicas=np.int64(4), strategy="fsdp", mesh={"shard": np.int8(2)})
    assert (made.mesh, made.replicas) == ({"shard": 2}, 4)


@pytest.mark.parametrize("convert", SCALARS.values(), ids=SCALARS)
def test_numbers_of_everything_else(convert: Callable[[Any], Any], tmp_path: Any) -> None:
    """Each equals what the same call with Python's numbers makes."""
    calls: tuple[tuple[Any, ...], ...] = (
        (sparkdl.max_epoch, 3),
        (sparkdl.max_iteration, 3),
        (sparkdl.every, 3),
        (sparkdl.every_seconds, 1.5),
        (sparkdl.max_time, 1.5),
        (sparkdl.min_loss, 0.25),
        (lambda n: sparkdl.max_score("accuracy", n), 0.5),
        (lambda n: sparkdl.plateau("accuracy", n), 3),
        (lambda n: sparkdl.plateau("accuracy", 3, n), 0.5),
        (lambda n: sparkdl.Checkpoint(tmp_path, keep=n), 3),
        (lambda n: sparkdl.Checkpoint(tmp_path, asynchronous=n), True),
        (lambda n: sparkdl.Validation(None, batch_size=n), 64),
        (lambda n: sparkdl.TopK(ratio=n), 0.5),
        (lambda n: sparkdl.PowerSGD(rank=n), 2),
        (lambda n: sparkdl.Sequence(max_length=n), 9),
        (lambda n: sparkdl.Sequence(padding=n), 0.5),
        (lambda n: sparkdl.Image(size=(n, n)), 32),
        (lambda n: sparkdl.DDP(bucket_cap_mb=n), 2.5),
        (lambda n: sparkdl.FSDP(cpu_offload=n), True),
        (lambda n: sparkdl.Pipeline(micro_batches=n), 2),
        (lambda n: sparkdl.Synchronous(drop_stragglers=n), 0.25),
        (lambda n: sparkdl.StaleSynchronous(staleness=n), 2),
        (lambda n: sparkdl.Asynchronous(quorum=n), 2),
        (lambda n: sparkdl.DiLoCo(inner_steps=n), 4),
        (lambda n: sparkdl.DiLoCo(drop_stragglers=n), 0.25),
    )
    for number, (make, value) in enumerate(calls):
        found, expected = make(convert(value)), make(value)
        assert repr(found) == repr(expected), number
        assert found == expected, number


def test_what_is_no_number_is_told_as_before() -> None:
    for value, told in ((np.float64(2.5), "2.5"), (np.array([1, 2]), "[1, 2]"), ("4", "'4'")):
        assert (
            message_of(sparkdl.ParameterError, trainer, batch_size=value)
            == f"batch_size={told}: give a whole number of at least 1."
        )
    with pytest.raises(sparkdl.ParameterError, match=r"class_weights=\[\[1.0, 1.0\]\]: give "):
        trainer(class_weights=np.ones((1, 2)))


def test_what_is_not_of_numbers_stays() -> None:
    for value in (nn.Linear(2, 2), np.float64, torch.optim.SGD, "text", None, {1, 2}):
        assert plain(value) is value


def test_weights_to_start_from_and_numbers_of_an_optimizer() -> None:
    """They are the user's own library's: arrays become tensors, and a checkpoint takes the numbers."""
    arrays = {"weight": np.ones((3, 2), dtype=np.float32), "bias": np.zeros(3, dtype=np.float32)}
    for given in (arrays, arrays | {"bias": torch.zeros(3)}):
        module = prepare(trainer(weights=given), None).module
        assert torch.equal(module(torch.ones(1, 2)), torch.full((1, 3), 2.0))
    groups = [{"lr": np.float32(0.5), "betas": (np.float64(0.9), 0.5), "step": np.int64(3)}]
    written = encode(groups, "groups")
    assert decode(written, {}) == [{"lr": 0.5, "betas": (0.9, 0.5), "step": 3}]
