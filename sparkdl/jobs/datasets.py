"""Data of a job: reading, writing, holding out."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sparkdl.codec.files import path_here
from sparkdl.data.arrow_tasks import content_hash
from sparkdl.errors import ParameterError
from sparkdl.jobs.components import Component
from sparkdl.jobs.config import Config, DataSection
from sparkdl.jobs.console import told

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SHARES = 1 << 20
_SEED = "seed of jobs.datasets.split"
_FILES = ("avro", "csv", "json", "orc", "parquet", "text")
_DEFAULTS = {"csv": {"header": "true", "inferSchema": "true"}}


def read(
    spark: SparkSession,
    key: str,
    path: str,
    format: str,
    options: dict[str, Any],
    select: list[str] | None = None,
) -> DataFrame:
    """Read the data at ``path``, which ``key`` names; a CSV has a header and typed columns.

    Raises ParameterError.
    """
    options = {**_DEFAULTS.get(format, {}), **options}
    suffix = PurePosixPath(path).suffix.removeprefix(".")
    in_file = not key.startswith("--")
    remedy = ""
    if suffix in _FILES and suffix != format:
        remedy = (
            f" The name ends in .{suffix}: {'data.format: ' if in_file else '--format '}{suffix}?"
        )
    with told(f"{key}: {path} cannot be read as {format}", remedy):
        data = spark.read.format(format).options(**options).load(path)
    if select is not None:
        with told("data.select" if in_file else "--select"):
            data = data.selectExpr(*select)
    return data


def read_samples(spark: SparkSession, config: Config) -> tuple[DataFrame, DataFrame | None]:
    """Return the training data and the validation data."""
    validation = config.validation
    samples = _of_section(spark, "data.train", config.data.train, config.data)
    if validation is None:
        return samples, None
    if validation.share is not None:
        return split(samples, validation.share, config.trainer.seed)
    assert validation.data is not None
    return samples, _of_section(spark, "validation.data", validation.data, config.data)


def read_test(spark: SparkSession, data: DataSection) -> DataFrame | None:
    """Return the test data, if there are any."""
    return None if data.test is None else _of_section(spark, "data.test", data.test, data)


def _of_section(spark: SparkSession, key: str, path: str, data: DataSection) -> DataFrame:
    return read(spark, key, path, data.format, data.options, data.select)


def write(data: DataFrame, path: str, format: str, mode: str) -> None:
    """Write ``data`` so that :func:`read` needs no options; files replace others when complete."""
    from sparkdl.infer.remote import HadoopFolder

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
    """Call ``data.prepare``, which writes the data, unless its files exist. Raises ParameterError."""
    if data.prepare is not None:
        paths = [path_here(path) for path in (data.train, data.test) if path is not None]
        if not all(path.exists() for path in paths):
            Component.of(data.prepare).bound()(*paths)
