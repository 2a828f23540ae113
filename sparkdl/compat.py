"""The differences between the versions of Spark that sparkdl runs on; no other module asks for one.

A name that all of them have in the same place (``from pyspark import RDD``) is used from there. What
a version cannot do is a row of the table in ``docs/versions.md``.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyspark

from sparkdl.errors import DataError

try:
    from pyspark.core.rdd import PipelinedRDD as PipelinedRDD
except ImportError:  # 3.5
    from pyspark.rdd import PipelinedRDD as PipelinedRDD  # type: ignore[no-redef]

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

OLDEST, NEWEST = (3, 5), (4, 3)
"""The versions that the tests run on, and those between them."""
VERSION = tuple(int(number) for number in pyspark.__version__.split(".")[:2])
UNIX_SOCKETS = VERSION >= (4, 1)
"""Python workers may talk to the JVM over Unix sockets."""
ARROW_FUNCTIONS = VERSION >= (4, 1)
"""``functions.arrow_udf`` is there."""
CONNECT = VERSION >= (4, 0)
"""The client of Spark Connect has what training needs."""
_EXACT = 2**53
"""The whole numbers that a float of 64 bits tells apart."""


def load_from_socket(address: Any, serializer: Any) -> Any:
    """Return the items that the JVM serves at ``address``."""
    try:
        from pyspark.util import _load_from_socket
    except ImportError:  # 3.5
        from pyspark.rdd import _load_from_socket  # type: ignore[no-redef]
    return _load_from_socket(address, serializer)


def to_seq(jvm: Any, items: Any) -> Any:
    """Return a Java list as a ``Seq`` of Scala 2.12 or 2.13."""
    return jvm.PythonUtils.toSeq(items)


def cancel_group(context: SparkContext, group: str, reason: str) -> None:
    """Cancel the jobs of a group, and let Spark report ``reason``."""
    scala = context._jsc.sc()
    if VERSION >= (4, 0):
        scala.cancelJobGroup(group, reason)
        return
    tracker = context.statusTracker()
    for job in set(tracker.getActiveJobsIds()).intersection(tracker.getJobIdsForGroup(group)):
        scala.cancelJob(job, reason)


def for_metadata(session: Any) -> Any:
    """Return what ``pyspark.ml`` writes and reads metadata with: the session, or its context on 3.5."""
    return session if VERSION >= (4, 0) else session.sparkContext


def untried() -> str | None:
    """Return a sentence if this version of Spark is none that the tests run on."""
    if OLDEST <= VERSION <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return (
        f"sparkdl is tested with Spark {oldest} to {newest}, and this is Spark {pyspark.__version__}: "
        f"what it does here is not known."
    )


def arrow_udf(
    body: Callable[[Iterator[Any]], Iterator[pa.Array]], types: Sequence[DataType], sql_type: str
) -> Any:
    """Return a function of columns whose Arrow arrays ``body`` maps to arrays of ``sql_type``.

    ``body`` takes an iterator of arrays, or of tuples where there are several columns. Before Spark
    4.1 pandas is between Spark and Arrow, which costs a copy.
    """
    import pyarrow as pa
    from pyspark.sql import functions

    if not ARROW_FUNCTIONS:
        return _pandas_udf(body, types, sql_type)
    several = len(types) > 1

    def predict(batches):  # type: ignore[no-untyped-def]
        return body(batches)

    predict.__annotations__ = {
        "batches": Iterator[tuple[pa.Array, ...]] if several else Iterator[pa.Array],
        "return": Iterator[pa.Array],
    }
    return functions.arrow_udf(predict, returnType=sql_type)  # type: ignore[call-overload]


def _pandas_udf(body: Callable[..., Any], types: Sequence[DataType], sql_type: str) -> Any:
    import pandas as pd
    from pyspark.sql import SparkSession, functions
    from pyspark.sql.pandas.types import to_arrow_type

    kinds, several = [to_arrow_type(kind) for kind in types], len(types) > 1
    zone = None
    if any("timestamp[us, tz" in str(kind) for kind in kinds):
        zone = SparkSession.active().conf.get("spark.sql.session.timeZone")

    def predict(batches):  # type: ignore[no-untyped-def]
        from sparkdl.compat import from_pandas, to_pandas

        arrays = (
            tuple(
                from_pandas(values, kind, zone) for values, kind in zip(batch, kinds, strict=True)
            )
            if several
            else from_pandas(batch, kinds[0], zone)
            for batch in batches
        )
        yield from map(to_pandas, body(arrays))

    taken = typing.Tuple[pd.Series, ...] if several else pd.Series  # noqa: UP006 - 3.5 knows no other
    predict.__annotations__ = {
        "batches": typing.Iterator[taken],  # type: ignore[valid-type]
        "return": typing.Iterator[pd.Series],
    }
    return functions.pandas_udf(predict, returnType=sql_type)  # type: ignore[call-overload]


def from_pandas(values: Any, kind: pa.DataType, zone: str | None = None) -> pa.Array:
    """Return what Spark made a pandas Series (or DataFrame, of a struct) of as Arrow again.

    pandas has no null in a column of floats: NaN counts as null.

    Raises:
        DataError: pandas has lost which numbers they were.
    """
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    if isinstance(values, pd.DataFrame):
        fields = [from_pandas(values[field.name], field.type, zone) for field in kind]
        null = values.isna().all(axis=1).to_numpy()  # pandas has no null struct
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=pa.array(null))
    whole, each = kind, [values]
    if pa.types.is_list(kind):
        whole, each = kind.value_type, [np.asarray(row) for row in values if row is not None]
    if pa.types.is_integer(whole):
        floats = [abs(row) for row in each if row.dtype.kind == "f"]
        if any((row >= _EXACT).any() for row in floats):
            raise DataError(
                "a column of whole numbers has nulls beside numbers above 2**53, which pandas cannot "
                "hold: leave out the rows with nulls, or use Spark 4.1 or newer."
            )
    if pa.types.is_timestamp(kind) and kind.tz is not None and values.dt.tz is None:
        values = values.dt.tz_localize(zone)  # raises at the hour that a clock shows twice
    return pa.array(values, type=kind, from_pandas=True)


def to_pandas(values: pa.Array) -> Any:
    """Return an Arrow array as the Series (or DataFrame, of a struct) that Spark takes."""
    import pandas as pd
    import pyarrow as pa

    if not pa.types.is_struct(values.type):
        return values.to_pandas()
    names = [field.name for field in values.type]
    columns = zip(names, values.flatten(), strict=True)
    return pd.DataFrame({name: column.to_pandas() for name, column in columns})


def apply_in_arrow(
    grouped: Any, task: Callable[..., pa.Table], schema: StructType, *inputs: StructType
) -> DataFrame:
    """Return ``grouped.applyInArrow``, also of groups that go together; pandas is between on 3.5.

    ``task`` takes the key and a table of the one schema of ``inputs``, or a table of each.
    """
    if VERSION >= (4, 0):
        return grouped.applyInArrow(task, schema)
    from pyspark.sql import SparkSession
    from pyspark.sql.pandas.types import to_arrow_schema

    taken, result = [to_arrow_schema(one) for one in inputs], to_arrow_schema(schema)
    zone = SparkSession.active().conf.get("spark.sql.session.timeZone")

    def of_group(key, rows):  # type: ignore[no-untyped-def]
        import pandas as pd

        from sparkdl.compat import from_pandas, table_from_pandas, table_to_pandas

        scalars = tuple(
            from_pandas(pd.Series([value]), field.type, zone)[0]
            for value, field in zip(key, result, strict=False)
        )
        return table_to_pandas(task(scalars, table_from_pandas(rows, taken[0], zone)), result)

    def of_two(left, right):  # type: ignore[no-untyped-def]
        from sparkdl.compat import table_from_pandas, table_to_pandas

        tables = (table_from_pandas(*one, zone) for one in zip((left, right), taken, strict=True))
        return table_to_pandas(task(*tables), result)

    return grouped.applyInPandas(of_group if len(inputs) == 1 else of_two, schema)


def table_from_pandas(rows: Any, schema: pa.Schema, zone: str | None) -> pa.Table:
    """Return the rows of a group as Spark has them."""
    import pyarrow as pa

    columns = [from_pandas(rows[field.name], field.type, zone) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def table_to_pandas(table: pa.Table, schema: pa.Schema) -> Any:
    """Return a group's result as Spark takes it."""
    return table.cast(schema).to_pandas(maps_as_pydicts="strict")
