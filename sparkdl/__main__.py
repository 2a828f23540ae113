"""``python -m sparkdl``: versions, devices, Java and what is set, to be pasted into a report.

``python -m sparkdl session`` says what a session of Spark can train with, and ``python -m sparkdl
archive`` makes the archive of Java's classes that later sessions start faster with, and ``python -m
sparkdl report`` writes the reports of runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sparkdl import archive
from sparkdl.codec.describe import REDACTED, is_secret, without_credentials
from sparkdl.settings import DISTRIBUTION, NEEDED_FOR_SPEED, PREFIX, __version__

LIBRARIES = (
    "pyspark", "torch", "numpy", "pyarrow", "pandas", "safetensors", "tqdm",
    "transformers", "peft", "mlflow", "mlflow-skinny", "optuna", "torchmetrics", "tensorboard",
    "bokeh", "pillow", "fsspec", "ipykernel", "ipywidgets",
)  # fmt: skip
VARIABLES = (
    "JAVA_HOME", "SPARK_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP", "SPARK_REMOTE", "SPARK_LOCAL_DIRS",
    "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYSPARK_SUBMIT_ARGS", "PYTHONPATH", "VIRTUAL_ENV",
    archive.SWITCH, "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MLFLOW_TRACKING_URI",
)  # fmt: skip


def main(arguments: list[str] | None = None, program: str = "python -m sparkdl") -> None:
    """Print the report, or what a session can train with, or make the archive of Java's classes."""
    parser = argparse.ArgumentParser(prog=program)
    commands = parser.add_subparsers(dest="command")
    about = "start a session, and say which engines can train in it and how fast"
    command = commands.add_parser("session", help=about, description=about)
    command.add_argument("--master", help="such as local[4], yarn or spark://host:7077")
    command.add_argument("--remote", help="of a Spark Connect server, such as sc://host:15002")
    command.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE")
    about = "write the report of a run or a search; of several runs, a page that compares them"
    command = commands.add_parser("report", help=about, description=about)
    command.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="of a run, a model or a search"
    )
    command.add_argument("--output", help="the file; else report.html there, or comparison.html")
    about = "archive Java's classes of a session of Spark, so that later sessions start faster"
    commands.add_parser("archive", help=about, description=about)
    options = parser.parse_args(arguments)
    if options.command == "archive":
        _archive_classes()
        return
    if options.command == "report":
        from sparkdl import reports

        if len(options.folders) == 1:
            print(reports.report_of(options.folders[0], options.output))
        else:
            print(reports.compare(options.folders, output := options.output or "comparison.html"))
            print(f"\n{output}")
        return
    if options.command == "session":
        settings = dict(pair.partition("=")[::2] for pair in options.conf)
        _print_diagnosis(options.master, options.remote, settings)
        return
    for title, lines in report().items():
        print(title)
        for name, text in lines:
            print(f"  {name:<22} {text}")


def _print_diagnosis(master: str | None, remote: str | None, settings: dict[str, str]) -> None:
    import sparkdl

    if remote is None:
        spark = sparkdl.session(master, **settings)
    else:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.remote(remote)
        for key, value in settings.items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
    try:
        print(sparkdl.diagnose(spark))
    finally:
        spark.stop()


def _archive_classes() -> None:
    """Let a JVM write the classes of a session and a fit into the archive, in place of older ones."""
    from pyspark import SparkContext

    import sparkdl

    path, began = archive.archive_path(archive.spark_home()), time.monotonic()
    if path is None:
        raise sparkdl.SessionError(f"there is no archive without Java: {_java()}.")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    print("archiving Java's classes of a session of Spark, a minute or two", file=sys.stderr)
    draft.unlink(missing_ok=True)  # Java writes none on top of another
    local = {"spark.driver.bindAddress": "127.0.0.1", "spark.sparkdl.progress": "false"}
    with archive.recorded(draft):
        spark = sparkdl.session("local[2]", **local)
    gateway: Any = SparkContext._gateway
    try:
        _use_what_programs_use(spark)
    finally:
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()  # which is what ends the JVM
        gateway.proc.wait(timeout=600)
    if not draft.exists():
        raise sparkdl.SessionError(f"Java wrote no archive to {path.parent}: its reason is above.")
    draft.replace(path)
    for other in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*.jsa"):
        if other != path:
            other.unlink()
    size, seconds = path.stat().st_size / 1e6, time.monotonic() - began
    print(f"{path}: {size:.0f} MB, made in {seconds:.0f} s. sparkdl.session starts Java with it.")


def _use_what_programs_use(spark: Any) -> None:
    """Data from the driver and from files, a fit, an evaluation, predictions."""
    import torch
    from torch import nn

    import sparkdl

    frame = spark.createDataFrame(
        [([0.5, float(i)], i % 2) for i in range(64)], "x array<float>, y int"
    )
    points = spark.range(4).selectExpr("rand(1) AS x", "id AS y").randomSplit([0.5, 0.5], seed=1)
    points[0].show()
    with tempfile.TemporaryDirectory() as folder:
        frame.repartition(4).write.parquet(f"{folder}/data")
        read = spark.read.parquet(f"{folder}/data")
        trained = sparkdl.Trainer(
            model=partial(nn.Linear, 2, 2),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.Adam, lr=1e-3),
            features="x",
            label="y",
            batch_size=16,
            stop=sparkdl.max_epoch(1),
        ).fit(read)
        trained.evaluate(read)
        trained.transform(read).groupBy("y").count().collect()


def report() -> dict[str, list[tuple[str, str]]]:
    """Return the sections of the report; each has lines of a name and a text."""
    warning = stranger()
    sections = {
        f"sparkdl {__version__}": [
            ("installed at", str(Path(__file__).parent)),
            *([] if warning is None else [("WARNING", warning)]),
        ],
        "System": list(_system()),
        "Libraries": [(name, version) for name in LIBRARIES if (version := _version(name))],
        "Devices": list(_devices()),
        "Environment": [
            (name, _redacted(name, os.environ[name])) for name in VARIABLES if os.environ.get(name)
        ],
        "Spark settings": list(_spark_settings()),
    }
    return {title: lines for title, lines in sections.items() if lines}


def stranger() -> str | None:
    """Return a sentence if another project's distribution of this import name is installed too."""
    version = _version("sparkdl")
    if version is None:
        return None
    return (
        f"the distribution sparkdl {version} is another project's and has the same import name: "
        f"uninstall it (pip uninstall sparkdl) and install {DISTRIBUTION} anew."
    )


def _system() -> Iterator[tuple[str, str]]:
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield "CPUs", str(os.cpu_count())
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        yield "memory", f"{pages / 2**30:.1f} GiB"
    yield "Java", _java()
    yield "Java's classes", str(archive.found() or "no archive: python -m sparkdl archive makes it")


def _java() -> str:
    """Return the version and path of the Java that Spark would start."""
    path = archive.java()
    if path is None:
        return "not found: install Java 17 or newer, on PATH or in JAVA_HOME"
    try:
        done = subprocess.run(
            [path, "-version"], capture_output=True, encoding="utf-8", errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} cannot be started: {error}"
    lines = (done.stderr or done.stdout).splitlines() or ["it says no version"]
    told = next((line for line in lines if "version" in line), lines[-1])
    return f"{told} ({path})"


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    yield "torch", f"CUDA {torch.version.cuda or 'none'}, {torch.get_num_threads()} threads"
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        yield f"cuda:{number}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB"


def _spark_settings() -> Iterator[tuple[str, str]]:
    """Yield the settings of this package and those for speed in Spark's properties file."""
    folder = os.environ.get("SPARK_CONF_DIR")
    if folder is None:
        folder = str(archive.spark_home() / "conf")
    path = Path(folder, "spark-defaults.conf")
    if not path.is_file():
        yield "spark-defaults.conf", f"none in {folder}"
        return
    yield "spark-defaults.conf", str(path)
    for key, value in archive.pairs_in(path):
        if key.startswith((PREFIX, "spark.pyspark", "spark.master")) or key in NEEDED_FOR_SPEED:
            yield key, _redacted(key, value)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _redacted(name: str, value: str) -> str:
    return REDACTED if is_secret(name, value) else without_credentials(value)


if __name__ == "__main__":
    main()
