"""Any column of any type, and any Python record: either tensors or one sentence, never a stack."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from any_values import EXAMPLES, FLOATS, SPECS, columns
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as sql
from pyspark.sql.pandas.types import to_arrow_type

from sparkdl import Masked, Sequence
from sparkdl.data.columns.convert import as_array
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.records import Sample, WriteRecords, stack_records
from sparkdl.data.row_errors import BadRow, RowError
from sparkdl.data.schema import sample_columns
from sparkdl.errors import DataError

many = settings(max_examples=EXAMPLES or 150, deadline=None, derandomize=not EXAMPLES)


@many
@given(columns(), SPECS, st.sampled_from(["feature", "label", "weight"]), st.integers(0, 3))
def test_any_column_becomes_tensors_or_a_sentence(
    column: tuple[sql.DataType, list[Any]], spec: Any, role: str, before: int
) -> None:
    kind, values = column
    schema = sql.StructType([sql.StructField("x", kind)])
    features, label, weight = (
        (("x",), (), None)
        if role == "feature"
        else (("x",), ("x",), None)
        if role == "label"
        else ((), (), "x")
    )
    specs = {"x": spec} if spec else {}
    try:
        found = sample_columns(schema, features, label, weight, "float32", specs)
    except DataError as error:
        found, told = None, str(error)
    if found is None:
        assert 'column "x"' in told
        return
    chosen = found[-1]
    array = pa.array(values, to_arrow_type(kind))
    array = array.slice(min(before, len(array)))
    try:
        rows = to_numpy(array, chosen, 7)
    except RowError as error:
        rows, problem = None, error.problem
    if rows is None:
        assert problem.column == "x"
        check_problem(problem, range(7, 7 + len(array)))
    else:
        assert len(rows) == len(array)
        check_numbers(rows, missing=isinstance(spec, Masked))


def check_problem(problem: BadRow, rows: range) -> None:
    assert problem.row in rows
    assert problem.text
    assert problem.remedy.endswith(".")


def check_numbers(rows: Rows, missing: bool = False) -> None:
    plain = rows.flat[0] if isinstance(rows, Ragged) else rows
    assert plain.dtype.kind in "fiub"
    assert plain.dtype.kind != "f" or (~np.isinf(plain) if missing else np.isfinite(plain)).all()


RECORD_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | FLOATS
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.complex_numbers()
    | st.dates()
    | st.decimals()
    | st.just(object())
    | st.just(decimal.Decimal("NaN"))
    | st.sampled_from([np.float16, np.uint8, np.uint64, np.int32, np.complex64, "S3", object]).map(
        lambda dtype: np.zeros(2, dtype)
    )
    | st.sampled_from([torch.bfloat16, torch.float16, torch.complex64, torch.bool]).map(
        lambda dtype: torch.ones(2, dtype=dtype)
    )
    | st.sampled_from([torch.eye(2).to_sparse(), torch.ones(2, requires_grad=True), [[1], [2, 3]]]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=1), inner, max_size=2)
        | st.builds(Sample, inner, inner, inner)
    ),
    max_leaves=4,
)


@many
@given(
    st.lists(RECORD_VALUES, max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([{}, {"features": Sequence()}, {"features": Masked()}]),
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_any_record_becomes_tensors_or_a_sentence(
    records: list[Any], labelled: bool, weighted: bool, specs: Any
) -> None:
    task = WriteRecords(None, labelled, "float32", specs, weighted)  # type: ignore[arg-type]
    parts = []
    try:
        for row, record in enumerate(records):
            assert 0 <= task.content_hash(record) < 2**32
            parts.append((row, task._parts(record, row)))
        fields = stack_records(parts, [], specs) if parts else []
    except RowError as error:
        fields, problem = None, error.problem
    if fields is None:
        check_problem(problem, range(len(records)))
    else:
        for field in fields:
            check_numbers(field, missing=any(isinstance(s, Masked) for s in specs.values()))


MASKED = np.ma.masked_equal([1.0, 9.0], 9.0)


@pytest.mark.parametrize(
    "value",
    [
        MASKED,
        MASKED[1],
        [MASKED, MASKED],
        [[1.0, 2.0], MASKED],
        [1, MASKED[1]],
        [(MASKED[:1], MASKED[1:])],
        np.ma.masked_invalid([1.0, np.nan]),
    ],
)
def test_what_is_masked_is_told_and_what_lies_under_the_mask_not_taken(value: Any) -> None:
    """netCDF4 gives such arrays, with a fill value that is finite."""
    with pytest.raises(RowError, match="holds a masked value") as caught:
        as_array(value, "features", 3, "float32")
    check_problem(caught.value.problem, range(3, 4))


@pytest.mark.parametrize("value", [MASKED[:1], [MASKED[:1], [2.0]], MASKED.filled(0)])
def test_an_array_with_a_mask_in_which_nothing_is_masked(value: Any) -> None:
    found = as_array(value, "features", 3, "float32")
    assert type(found) is np.ndarray
    assert found.tolist() == np.asarray(value).tolist()
