"""The differences between the versions of Spark that sparkdl runs on; no other module asks for one.

A name that all of them have in the same place (``from pyspark import RDD``) is used from there. What
a version cannot do is a row of the table in ``docs/versions.md``.
"""

from __future__ import annotations

import copyreg
import dataclasses
import itertools
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
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
if VERSION < (4, 0):
    # a dataclass that travels by value would have no fields: its cloudpickle copies what marks them
    copyreg.pickle(type(dataclasses._FIELD), attrgetter("name"))  # type: ignore[attr-defined]


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
    body: Callable[[Iterator[Any]], Iterator[pa.Array]],
    types: Sequence[DataType],
    returned: DataType,
) -> Any:
    """Return a function of columns whose Arrow arrays ``body`` maps to arrays of ``returned``.

    ``body`` takes an iterator of arrays, or of tuples where there are several columns. Before Spark
    4.1 pandas is between Spark and Arrow, which costs a copy.
    """
    import pyarrow as pa
    from pyspark.sql import functions

    if not ARROW_FUNCTIONS:
        return _pandas_udf(body, types, returned)
    several = len(types) > 1

    def predict(batches):  # type: ignore[no-untyped-def]
        return body(batches)

    predict.__annotations__ = {
        "batches": Iterator[tuple[pa.Array, ...]] if several else Iterator[pa.Array],
        "return": Iterator[pa.Array],
    }
    return functions.arrow_udf(predict, returnType=returned)  # type: ignore[call-overload]


def _pandas_udf(body: Callable[..., Any], types: Sequence[DataType], returned: DataType) -> Any:
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
    return functions.pandas_udf(predict, returnType=returned)  # type: ignore[call-overload]


def from_pandas(values: Any, kind: pa.DataType, zone: str | None = None) -> pa.Array:
    """Return what Spark made a pandas Series (or DataFrame, of a struct) of as Arrow again.

    pandas has no null in a column of floats: NaN counts as null. Raises DataError where it has lost
    which numbers they were.
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
    try:
        return pa.array(values, type=kind, from_pandas=True)
    except pa.ArrowException:  # of another type, where a function of SQL gets one
        return pa.array(values, from_pandas=True)


def to_pandas(values: pa.Array) -> Any:
    """Return an Arrow array as the Series (or DataFrame, of a struct) that Spark takes.

    Spark looks into the items of arrays; all other values stay Arrow's, which knows NaN from null.
    """
    import pandas as pd
    import pyarrow as pa

    if pa.types.is_struct(values.type):
        return pd.DataFrame(
            {  # of a struct in it Spark takes dictionaries
                field.name: one.to_pandas() if pa.types.is_struct(one.type) else to_pandas(one)
                for field, one in zip(values.type, values.flatten(), strict=True)
            }
        )
    nested = pa.types.is_nested(values.type)
    return values.to_pandas(types_mapper=None if nested else pd.ArrowDtype)


def apply_in_arrow(
    task: Callable[..., pa.Table], schema: StructType, by: Sequence[str], *frames: DataFrame
) -> DataFrame:
    """Return ``task`` of each group of a DataFrame's rows, or of those of two that go together.

    ``task`` takes the key, a tuple of scalars, and a table, or two; ``by`` are columns as SQL quotes
    them, and ``schema`` is that of the result.
    """
    if VERSION >= (4, 0):
        first, *second = [frame.groupBy(*by) for frame in frames]
        return (first.cogroup(*second) if second else first).applyInArrow(task, schema)
    from pyspark.sql import Window, functions
    from pyspark.sql.types import StructType

    keys, packed = [f"k{i}" for i in range(len(by))], []
    for frame in frames:  # columns by number: two may have one name
        columns = [f"c{i}" for i in range(len(frame.columns))]
        packed.append((frame.select(*by, "*").toDF(*keys, *columns), columns))
    sides = []
    for side, (frame, _) in enumerate(packed):
        rows = [
            functions.struct(*columns)
            if frame is other
            else functions.lit(None).cast(StructType([other.schema[name] for name in columns]))
            for other, columns in packed
        ]
        named = [one.alias(f"rows{i}") for i, one in enumerate(rows)]
        sides.append(frame.select(*keys, functions.lit(side).alias("side"), *named))
    both = sides[0].union(sides[1]) if len(sides) > 1 else sides[0]
    # Spark brings the rows of a group together, and says by its own rules where the next begins
    number = functions.row_number().over(Window.partitionBy(*keys).orderBy("side"))
    names = tuple(tuple(frame.columns) for frame in frames)
    return both.select((number == 1).alias("first"), "*").mapInArrow(_Groups(task, names), schema)


@dataclass(frozen=True)
class _Groups:
    """The function of ``mapInArrow`` that calls ``task`` for each group of sorted rows."""

    task: Callable[..., pa.Table]
    names: tuple[tuple[str, ...], ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for group in _groups(batches):
            tables = [self._table(group, side) for side in range(len(self.names))]
            if len(tables) == 1:
                keys = group.column_names[1 : group.column_names.index("side")]
                tables.insert(0, tuple(group.column(name)[0] for name in keys))
            yield from self.task(*tables).to_batches()

    def _table(self, group: pa.Table, side: int) -> pa.Table:
        import pyarrow as pa
        import pyarrow.compute as pc

        rows = group.filter(pc.equal(group.column("side"), side)).column(f"rows{side}")
        return pa.Table.from_arrays(rows.flatten(), names=list(self.names[side]))


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows of each group; their column ``first`` is true where one begins."""
    import numpy as np
    import pyarrow as pa

    rows: list[pa.RecordBatch] = []
    for batch in batches:
        begins = np.flatnonzero(batch.column("first").to_numpy(zero_copy_only=False)).tolist()
        for i, (begin, end) in enumerate(itertools.pairwise([0, *begins, batch.num_rows])):
            if i and rows:
                yield pa.Table.from_batches(rows)
                rows = []
            if begin < end:
                rows.append(batch.slice(begin, end - begin))
    if rows:
        yield pa.Table.from_batches(rows)
