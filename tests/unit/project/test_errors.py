"""The exception tree, and how a message is put together."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from mistakes import message_of

import sparkdl
from sparkdl import errors, ml
from sparkdl.errors import (
    DataError,
    ParameterError,
    UserError,
    in_quotes,
    kind_of,
    nearest,
    raise_all,
    shown,
    text_for_number,
)

FAULT = (errors.SparkdlError, RuntimeError)
KINDS = {
    "SparkdlError": (Exception,),
    "UserError": (errors.SparkdlError, ValueError),
    **dict.fromkeys(("ParameterError", "DataError", "ModelError"), (UserError,)),
    **dict.fromkeys(("SessionError", "TrustError"), (UserError,)),
    "ArgumentError": (errors.ParameterError, TypeError),
    **dict.fromkeys(("TrainingError", "CheckpointError", "StaleReferenceError"), FAULT),
    **dict.fromkeys(("StalledError", "StateLostError"), (errors.TrainingError,)),
    "DamagedCheckpoint": (errors.CheckpointError,),
    "SlabFullError": (errors.TrainingError, OSError),
}


INSIDE = {"ArgumentError", "DamagedCheckpoint", "StaleReferenceError", "SlabFullError"}
"""Errors that no user has to name."""


def test_the_tree_of_errors() -> None:
    """A mistake of the user is a ValueError, and no fault of a run is one."""
    defined = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert {name: kind.__bases__ for name, kind in defined.items()} == KINDS
    for name in KINDS.keys() - INSIDE:
        assert getattr(sparkdl, name) is defined[name]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lab", ' Did you mean "label"?'),
        ("lable", ' Did you mean "label"?'),
        ("label", ' Did you mean "label"?'),
        ("xyzzy", ""),
    ],
)
def test_nearest(name: str, hint: str) -> None:
    assert nearest(name, ["features", "label", "weight"]) == hint
    assert nearest(name, iter(())) == ""


def test_several_problems_come_together() -> None:
    raise_all(DataError, [])
    assert message_of(DataError, raise_all, DataError, ["one."]) == "one."
    both = message_of(ParameterError, raise_all, ParameterError, ["one.", "two."])
    assert both == "2 problems:\n  - one.\n  - two."


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "an int"),
        ("a", "a str"),
        (None, "None"),
        (torch.zeros(1), "a Tensor"),
        (np.zeros(1), "an ndarray"),
        (
            torch.optim.lr_scheduler.LRScheduler.__new__(torch.optim.lr_scheduler.LRScheduler),
            "an LRScheduler",
        ),
        (np.uint8(1), "a uint8"),
        (np.float32(1), "a float32"),
    ],
)
def test_a_type_has_its_article(value: object, said: str) -> None:
    assert kind_of(value) == said


def fails_in_the_users_code() -> None:
    try:
        torch.nn.Linear(2, 3)(torch.zeros(5))
    except RuntimeError as error:
        raise errors.ModelError("the model fails.") from error


def test_a_notebook_shows_the_users_frames_alone() -> None:
    """A trainer's own frames, and those of torch, are left out."""
    with pytest.raises(ParameterError) as caught:
        sparkdl.Trainer(model=print, loss=print, optimizer=print, batch_size=0)
    lines = caught.value._render_traceback_()
    assert lines[0] == "Traceback (most recent call last):"
    assert sum(line.startswith("  File") for line in lines) == 1
    assert lines[-1].startswith("sparkdl.errors.ParameterError: batch_size=0")
    with pytest.raises(errors.ModelError) as caught:
        fails_in_the_users_code()
    text = "\n".join(caught.value._render_traceback_())
    assert "torch.nn.Linear(2, 3)" in text
    assert "modules/module.py" not in text
    assert "direct cause" in text


def test_a_library_may_lie_anywhere_and_so_may_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, code in (("library", "def fail(): return 1 / 0"), ("pyspark", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(code)
    (tmp_path / "pyspark/mine.py").write_text("import library\ndef call(): library.fail()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "pyspark")
    monkeypatch.setattr(errors, "_LIBRARIES", ("library",))
    with pytest.raises(ZeroDivisionError) as caught:
        importlib.import_module("mine").call()
    text = errors.frames_of_user(caught.value)
    assert "mine.py" in text
    assert str(tmp_path / "library") not in text


LAYERS = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(20)])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        ("fast", "'fast'"),
        ([1, "a"], "[1, 'a']"),
        ({"data": 2, "shard": 4}, "{'data': 2, 'shard': 4}"),
        (torch.nn.Linear(2, 2), "Linear(in_features=2, out_features=2, bias=True)"),
        (LAYERS, "<Sequential object>"),
        (torch.optim.SGD(LAYERS.parameters(), lr=0.1), "<SGD object>"),
        (torch.arange(500.0), "<Tensor object>"),
        ([LAYERS] * 2, "[<Sequential object>, <Sequential object>]"),
        (object(), "<object object>"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_shown_on_one_short_line(value: object, said: str) -> None:
    assert shown(value) == said


def test_long_text_is_cut() -> None:
    assert len(shown("x" * 5_000)) <= errors.LONGEST
    assert len(shown(["x" * 50] * 50)) <= errors.LONGEST


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"lr": "1e-2"}, 'lr is the text "1e-2": give a number, lr=0.01.'),
        ({"lr": 0.1, "mode": "fast"}, ""),
    ],
)
def test_text_that_is_to_be_a_number_is_named(keywords: dict[str, object], said: str) -> None:
    assert text_for_number(partial(torch.optim.Adam, **keywords)) == said


def test_words_are_in_double_quotes() -> None:
    assert in_quotes("fast") == '"fast"'
    assert in_quotes(LAYERS) == "<Sequential object>"
    assert in_quotes(3) == "3"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sparkdl.Trainer(epochs=3), "Give stop=sparkdl.max_epoch(3)."),  # type: ignore[call-arg]
        (
            lambda: sparkdl.Trainer(metrics=["auc"]),  # type: ignore[call-arg]
            "Give validation=sparkdl.Validation(data, metrics=[...]).",
        ),
        (
            lambda: sparkdl.Trainer(device="cuda"),  # type: ignore[call-arg]
            "Give replicas=2 for two GPUs: each task takes the one that Spark assigned to it, else the "
            "CPU.",
        ),
        (
            lambda: sparkdl.Trainer(collate_fn=print),  # type: ignore[call-arg]
            "Give columns={...}, how a column becomes a tensor, or augment=, a function of a sample.",
        ),
        (lambda: sparkdl.Trainer(batchsize=3), 'Did you mean "batch_size"?'),  # type: ignore[call-arg]
        (lambda: ml.TorchClassifier(learning_rate=0.1), 'Did you mean "learningRate"?'),
        (lambda: ml.TorchRegressor().setParams(epochs=3), "Give maxEpochs=3."),
        (lambda: sparkdl.TopK(rank=2), "It takes ratio, error_feedback."),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_argument_names_the_one_that_is_meant(
    make: Callable[[], object], message: str
) -> None:
    assert message_of(ParameterError, make).partition(". ")[2] == message
