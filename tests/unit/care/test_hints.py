"""What to do about a model or a loss that fails on the first rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.care.hints import input_hint, loss_hint
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Padding

COLUMN = ' "x" is one number a row: df.withColumn("x", functions.array("x")) makes it [rows, 1].'
BYTES = (
    " Images with scale=None are bytes (uint8): leave scale out, or convert them to floats in "
    "augment or in the model."
)
JOIN = (
    " Each of the 2 feature columns is an input of its own, model(a, b, ...); for one input join them "
    'first: df.selectExpr("array(x, n) AS features", ...), which is data.select of a job, or '
    "VectorAssembler."
)
POSITIONS = (
    ' The rows of "x" have up to 7 elements: if the model has fewer positions, cut them with '
    "max_length= of their sparkdl.Text or sparkdl.Sequence."
)
LONG = ' If "y" holds class numbers, cast it: df.withColumn("y", df["y"].cast("long")).'
WEIGHTS = " weight= and pos_weight= of a loss have a number for each output, or each class."
FLOAT = ' If "y" holds measurements, cast it: df.withColumn("y", df["y"].cast("array<float>")).'


RANGE = (
    ' "y" goes from 0 to 7: give the model an output for each class from 0 on, or renumber the classes '
    "(pyspark.ml.feature.StringIndexer)."
)
TUPLE = (
    " The 2 labels arrive as a tuple of tensors, loss(output, labels): give a loss that takes it, or "
    'make one array column of them: functions.array("y", "z").'
)


def error_of(call: Any, *inputs: Any) -> Exception:
    try:
        call(*inputs)
    except Exception as error:
        return error
    raise AssertionError("it works")


@pytest.mark.parametrize(
    ("inputs", "hint"),
    [
        ([torch.zeros(3)], COLUMN),
        ([torch.zeros(3), torch.zeros(3, dtype=torch.long)], JOIN),
        ([torch.zeros(3, 1, dtype=torch.uint8)], BYTES),
    ],
    ids=["one number a row", "several inputs", "bytes"],
)
def test_a_model_that_fails(inputs: list[torch.Tensor], hint: str) -> None:
    fields = [Field(name, "", ()) for name in ("x", "n")[: len(inputs)]]
    assert input_hint(error_of(nn.Linear(1, 1), *inputs), inputs, fields) == hint


@pytest.mark.parametrize(
    ("loss", "target", "hint"),
    [
        (nn.CrossEntropyLoss(), torch.tensor([0.0, 1.0]), LONG),
        (nn.CrossEntropyLoss(), torch.tensor([False, True]), LONG),
        (nn.BCEWithLogitsLoss(), torch.tensor([[0, 1], [1, 0]]), FLOAT),
        (nn.MultiMarginLoss(), torch.tensor([0, 7]), RANGE),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), torch.tensor([0, 1]), WEIGHTS),
        (nn.BCELoss(weight=torch.ones(3)), torch.zeros(2, 2), WEIGHTS),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), torch.zeros(2, 2), WEIGHTS),
    ],
    ids=[
        *("floats for classes", "booleans for classes", "classes for floats", "a class too many"),
        *("a weight too many of classes", "of outputs", "of positive ones"),
    ],
)
def test_a_loss_that_fails(loss: nn.Module, target: torch.Tensor, hint: str) -> None:
    output = torch.zeros(2, 2, requires_grad=True)
    found = loss_hint(error_of(loss, output, target), output, [target], [Field("y", "", ())])
    assert found == hint


def test_rows_longer_than_the_positions() -> None:
    inputs = [torch.full((3, 7), 9), torch.ones(3, 7, dtype=torch.long)]
    fields = [Field("x", "int64", (), Padding(mask=True)), Field("mask of x", "int64", ())]
    assert input_hint(RuntimeError("expanded size"), inputs, fields) == POSITIONS


def test_classes_that_are_the_last_dimension() -> None:
    loss, output, label = (
        nn.CrossEntropyLoss(),
        torch.randn(2, 4, 3),
        torch.tensor([[0, 2, 1, -100]] * 2),
    )
    error = error_of(loss, output, label)
    found = loss_hint(error, output, [label], [Field("y", "", ())])
    assert found.startswith(" torch takes classes as the second dimension: ")
    given = {"cross_entropy": nn.functional.cross_entropy}
    written = eval(found[found.index("lambda output, label") : -1], given)
    total, count = written(output, label)
    torch.testing.assert_close(total / count, loss(output.movedim(-1, 1), label))


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.CrossEntropyLoss(), lambda output, a, b: output.mean()]
)
def test_a_loss_of_one_label_that_is_given_several(loss: Any) -> None:
    output, targets = torch.zeros(2, 2), [torch.zeros(2), torch.ones(2)]
    error = error_of(loss, output, tuple(targets))
    labels = [Field("y", "", ()), Field("z", "", ())]
    assert loss_hint(error, output, targets, labels) == TUPLE
