"""Eight fits, predictions and a pipeline have the same bits on every version of Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cells
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SCRIPT = Path(cells.__file__).with_name("eight_fits.py")


def fits(python: str | Path, *arguments: str | Path) -> dict[str, str]:
    done = subprocess.run(
        [python, SCRIPT, *arguments],
        env=cells.environment(Path(python)),
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout.splitlines()[-1])["digests"]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> tuple[dict[str, str], Path]:
    """The digests of the installed Spark, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("here")
    return fits(sys.executable, folder), folder


@pytest.mark.parametrize(
    "cell",
    [
        "spark-3.5",
        pytest.param("spark-4.0", marks=pytest.mark.soak),
        pytest.param("spark-4.1", marks=pytest.mark.soak),
        pytest.param("spark-4.2", marks=pytest.mark.soak),
    ],
)
def test_same_bits(cell, here, tmp_path):
    """The last fit goes on from the checkpoint of the installed Spark."""
    digests, folder = here
    assert fits(cells.build(cell), tmp_path, "--resume", folder) == digests
