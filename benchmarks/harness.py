"""What the benchmarks share: fresh processes, sessions, timed training runs, tables."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pyspark import __version__ as pyspark_version
from pyspark.sql import SparkSession
from work import Work

import sparkdl

HERE = Path(__file__).resolve().parent
RANKS = 2
COMPUTE = ("data", "forward", "backward")

Lap = Mapping[str, float]
"""Seconds of one iteration by activity; "whole" is from its end to the end of the one before."""


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a process, and so in a JVM, of its own.

    RuntimeError, with the traceback, for any exception: Spark's own do not pickle.
    """
    start = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=start) as pool:
        return pool.submit(_call, function, args).result()


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except Exception:
        raise RuntimeError(traceback.format_exc()) from None


def session(master: str = f"local[{RANKS}]", **settings: str) -> SparkSession:
    """A quiet session whose workers can import the modules of this directory."""
    paths = [str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    torch.set_num_threads(1)
    quiet = {"spark.ui.enabled": "false", "spark.sparkdl.progress": "false"}
    return sparkdl.session(master, **(quiet | settings))


def trainer(work: Work, batch: int, stop: sparkdl.Trigger, **more: Any) -> sparkdl.Trainer:
    """A trainer of ``work`` with two replicas, unless ``more`` says otherwise."""
    return sparkdl.Trainer(
        **{
            "model": work.make,
            "loss": work.loss,
            "optimizer": work.optimizer,
            "batch_size": batch,
            "replicas": RANKS,
            "stop": stop,
            **more,
        }
    )


def laps(history: Iterable[Mapping[str, Any]]) -> list[Lap]:
    """Of a run's history. The first iteration, which has none before it, counts from its start."""
    rows = list(history)
    clock = [0.0, *(row["seconds"] for row in rows)]
    return [
        {**row["timings"], "whole": end - begin}
        for row, (begin, end) in zip(rows, itertools.pairwise(clock), strict=True)
    ]


def computing(lap: Lap) -> float:
    """Forward and backward of the slower replica."""
    return lap.get("forward", 0.0) + lap.get("backward", 0.0)


def medians(some: Sequence[Lap]) -> dict[str, float]:
    """Milliseconds by activity; with "compute" (forward and backward), "beyond" it, and "jobs": all
    but data, forward and backward."""
    names = dict.fromkeys(name for lap in some for name in lap)
    found = {name: median_ms([lap.get(name, math.nan) for lap in some]) for name in names}
    found["compute"] = median_ms([computing(lap) for lap in some])
    found["beyond"] = median_ms([lap["whole"] - computing(lap) for lap in some])
    found["jobs"] = median_ms(
        [lap["whole"] - sum(lap.get(k, 0.0) for k in COMPUTE) for lap in some]
    )
    return found


def median_ms(seconds: Iterable[float]) -> float:
    """In milliseconds; NaN, where something was not measured, is left out."""
    known = [value for value in seconds if not math.isnan(value)]
    return statistics.median(known) * 1e3 if known else math.nan


def hardware() -> str:
    """One line on the machine and what it has to do besides."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), "CPU"
    )
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{os.cpu_count()} cores ({model}), torch {torch.__version__}, pyspark {pyspark_version}, "
        f"load averages {load}. Medians."
    )


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; numbers with three digits, NaN and None as a dash."""
    lines = [list(head), ["---"] * len(head), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything: does it run?")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    return parser


def write_json(path: str | None, figures: Any) -> None:
    if path:
        Path(path).write_text(json.dumps(figures, indent=1, default=vars) + "\n")
