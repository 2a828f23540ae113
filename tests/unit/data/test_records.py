"""Records of an RDD that have names: they are read by them, never by position."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from pyspark.sql import Row

from sparkdl.data.records import Names, Sample
from sparkdl.data.row_errors import RowError

NAMES = Names(("ids", "mask"), ("label",), "weight", inputs=("input_ids", "attention_mask"))


class Named(NamedTuple):
    weight: float
    label: int
    mask: Any
    ids: Any


@pytest.mark.parametrize(
    "record",
    [
        Row(label=1, mask=[0, 1], other="x", ids=[5, 6], weight=2.0),
        Named(2.0, 1, [0, 1], [5, 6]),
        {"weight": 2.0, "mask": [0, 1], "ids": [5, 6], "label": 1},
        Sample(([5, 6], [0, 1]), 1, 2.0),
    ],
    ids=["Row", "named tuple", "mapping", "Sample"],
)
def test_names_say_what_is_what(record: Any) -> None:
    assert NAMES.sample(record, 0) == Sample(([5, 6], [0, 1]), 1, 2.0)


@pytest.mark.parametrize("record", [([1.0], 0), [1.0, 0], 3.0, np.ones(2), Row([1.0], 0), None])
def test_what_has_no_names_stays(record: Any) -> None:
    assert NAMES.sample(record, 0) is record


def test_other_names_are_told_where_the_position_would_decide() -> None:
    record = Row(y=1, x=[0.5])
    names = Names(("features",), ("label",))
    for bare in (0, 1):
        with pytest.raises(RowError, match="is a Row of y, x, which has no features, label"):
            names.sample(record, 3, bare)
    for bare in (2, None):  # they are the features alone, in order
        assert names.sample(record, 3, bare) is record


def test_features_by_keyword() -> None:
    given = {"attention_mask": [0, 1], "input_ids": [5, 6]}
    assert NAMES.in_order(given, 0) == ([5, 6], [0, 1])
    assert NAMES.in_order(([5, 6], [0, 1]), 0) == ([5, 6], [0, 1])
    assert Names(("x",), inputs=("values",)).in_order({"values": [1.0]}, 0) == [1.0]
    with pytest.raises(RowError, match="is a dict of input_ids, and lacks attention_mask"):
        NAMES.in_order({"input_ids": [5, 6]}, 0)
    assert Names(("x",)).in_order(given, 0) is given  # by position: told where it is made a tensor
