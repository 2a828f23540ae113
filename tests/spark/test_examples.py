"""Every example runs and learns; one of them also as a newcomer starts it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from launch import soak_but
from pyspark import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
LEARNED = {
    "digits": ("accuracy", 0.95),
    "tabular_etl": ("r2", 0.35),
    "two_inputs": ("accuracy", 0.9),
    "rdd_samples": ("accuracy", 0.93),
    "images": ("accuracy", 0.85),
    "sequences": ("accuracy", 0.93),
    "streaming": ("accuracy", 0.85),
    "fine_tuning": ("accuracy", 0.9),
    "early_stopping": ("accuracy", 0.9),
    "engines": ("same weights", 1.0),
    "gang_run": ("agreement", 0.999),
    "matrix_factorization": ("asynchronous clients", 0.7),
    "lstm_wavefront": ("agreement", 1.0),
    "two_optimizers": ("near", 0.8),
    "fine_tune_text": ("accuracy", 0.9),
    "fully_sharded": ("accuracy", 0.92),
    "generate_text": ("accuracy", 0.99),
    "pipeline": ("accuracy", 0.94),
    "score_any_model": ("agreement", 0.999),
    "tensor_parallel": ("accuracy", 0.85),
    "ml_pipeline": ("accuracy", 0.9),
    "several_tasks": ("urgent/auc", 0.95),
    "tune_digits": ("accuracy", 0.9),
}
ROWS = [(name, *learned) for name, learned in LEARNED.items()]
IN_THE_GUIDE = (
    *("digits", "early_stopping", "engines", "fine_tune_text", "fine_tuning", "fully_sharded"),
    *("generate_text", "images", "matrix_factorization", "ml_pipeline", "pipeline", "rdd_samples"),
    *("score_any_model", "sequences", "several_tasks", "streaming", "tabular_etl"),
    *("tensor_parallel", "tune_digits", "two_optimizers"),
)
"""Examples of what a page of the guide, or a job of the tests, trains as well: these soak."""
FOUR_SLOTS = {"hybrid": ("accuracy", 0.94)}
"""These need more than the session of the tests has, and run as scripts."""


@pytest.fixture
def example(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[ModuleType]:
    """The module of an example; what it defines travels to the workers as from a script."""
    name = f"example_{request.param}"
    path = ROOT / "examples" / f"{request.param}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    yield module
    spark.catalog.clearCache()
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[name]


@pytest.mark.parametrize(
    ("example", "metric", "least"),
    soak_but([row for row in ROWS if row[0] not in IN_THE_GUIDE], ROWS),
    indirect=["example"],
    ids=list(LEARNED),
)
def test_example_learns(
    spark: SparkSession,
    example: ModuleType,
    metric: str,
    least: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = example.main(spark)
    assert result[metric] >= least
    assert f"{result[metric]:.3f}" in capsys.readouterr().out
    assert example.__doc__


@pytest.mark.parametrize("name", FOUR_SLOTS)
@pytest.mark.soak
def test_example_learns_as_a_script(name: str) -> None:
    metric, least = FOUR_SLOTS[name]
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    (found,) = re.findall(rf"{metric} (\d\.\d+)", done.stdout)
    assert float(found) >= least
    apart = [float(found) for found in re.findall(r"to (\de-\d+)", done.stdout)]
    assert len(apart) == 3
    assert max(apart) < 1e-5


def test_every_example_is_tested_and_short() -> None:
    files = list((ROOT / "examples").glob("*.py"))
    assert {file.stem for file in files} == LEARNED.keys() | FOUR_SLOTS.keys()
    for file in files:
        assert len(file.read_text().splitlines()) < 90, file


@pytest.mark.soak
def test_as_a_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/two_inputs.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("49 held-out wines: accuracy "), done.stdout
