"""Reading data for a job, and writing the data set of the example."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from jobs.sections import DataSection
from jobs.spark_errors import told
from sparkdl import ParameterError
from sparkdl.data.arrow_tasks import content_hash
from sparkdl.errors import nearest
from sparkdl.infer.remote import HadoopFolder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SHARES = 1 << 20
_SEED = "seed of jobs.datasets.split"
_FILES = ("avro", "csv", "json", "orc", "parquet", "text")
_DEFAULTS = {"csv": {"header": "true", "inferSchema": "true"}}


def read(spark: SparkSession, path: str, format: str, options: dict[str, Any]) -> DataFrame:
    """Read the data at ``path``; a CSV has a header and typed columns unless ``options`` differ."""
    options = {**_DEFAULTS.get(format, {}), **options}
    with told(f"{path} cannot be read"):
        return spark.read.format(format).options(**options).load(path)


def write(data: DataFrame, path: str, format: str, mode: str) -> None:
    """Write ``data`` so that :func:`read` needs no options; files replace others when complete."""
    writer = data.write.mode(mode).format(format).options(**_DEFAULTS.get(format, {}))
    if mode != "overwrite" or format not in _FILES:
        writer.save(path)
        return
    spark = data.sparkSession
    configuration = spark._jsparkSession.sessionState().newHadoopConf()
    with HadoopFolder.at(path, spark._jvm, configuration).replacing() as new:
        writer.save(new)


def check_apart(data: DataFrame, output: str, kept: Path) -> None:
    """Refuse an ``output`` that contains files of ``data``, or the folder ``kept``.

    Spark deletes what it overwrites before it reads. Raises ParameterError.
    """
    with told(f"{output} cannot be written"):
        place = _place(data.sparkSession, output)
        for file in [*data.inputFiles(), kept.resolve().as_uri()]:
            path = _place(data.sparkSession, unquote(file))
            if path.is_relative_to(place):
                raise ParameterError(
                    f"--overwrite would delete {unquote(file)}: give another --output."
                )


def _place(spark: SparkSession, path: str) -> PurePosixPath:
    """Return the path with its scheme and host, and without symbolic links if it is local."""
    assert spark._jvm is not None
    found = spark._jvm.org.apache.hadoop.fs.Path(path)
    system = found.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
    uri = system.makeQualified(found).toUri()
    inside = os.path.realpath(uri.getPath()) if uri.getScheme() == "file" else uri.getPath()
    return PurePosixPath(f"{uri.getScheme()}://{uri.getAuthority() or ''}{inside}")


def split(data: DataFrame, share: float, seed: int) -> tuple[DataFrame, DataFrame]:
    """Split off about ``share`` of the rows; return the remaining rows and these.

    A hash of their content and the seed selects the rows. The selection is therefore the same in
    every reading of the data, on any number of cores, and equal rows stay together.
    """
    from pyspark.sql import functions as f

    seeded = data.select(f.lit(seed).alias(_SEED), "*")
    held = f.pmod(content_hash(seeded), f.lit(_SHARES)) < round(share * _SHARES)
    return seeded.where(~held).drop(_SEED), seeded.where(held).drop(_SEED)


def prepare(data: DataSection) -> None:
    """Write the data set ``data.prepare`` if its files do not exist. Raises ParameterError."""
    if data.prepare is None:
        return
    if data.prepare not in _WRITERS:
        raise ParameterError(
            f'data.prepare: "{data.prepare}" is not a known data '
            f"set.{nearest(data.prepare, _WRITERS)} Known: {', '.join(_WRITERS)}."
        )
    if data.format != "parquet" or data.test is None:
        raise ParameterError("data.prepare writes Parquet to data.train and data.test: give both.")
    for path in (data.train, data.test):
        if re.match(r"[A-Za-z][\w+.-]*:/", path):
            raise ParameterError(
                f"data.prepare writes to local paths, not to a URI such as {path}: copy the files "
                "there, and set data.prepare=null."
            )
    if not (Path(data.train).exists() and Path(data.test).exists()):
        _WRITERS[data.prepare](Path(data.train), Path(data.test))


def _write_digits(train: Path, test: Path) -> None:
    """Write scikit-learn's 1,797 handwritten digits.

    The columns are features array<float> (64 pixels from 0 to 16, row by row) and label bigint. The
    same four fifths are for training each time."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ParameterError(
            "data.prepare: digits come with scikit-learn: pip install scikit-learn."
        ) from None
    import pyarrow as pa
    from pyarrow import parquet

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=0.2, random_state=0, stratify=labels)
    for path, features, label in ((train, parts[0], parts[2]), (test, parts[1], parts[3])):
        table = pa.table(
            {
                "features": pa.array(list(features.astype("float32"))),
                "label": pa.array(label.astype("int64")),
            }
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        parquet.write_table(table, unfinished)
        unfinished.replace(path)


_WRITERS = {"digits": _write_digits}
