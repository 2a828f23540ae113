"""Eight fits, predictions and a pipeline have the same bits on every version of Spark."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import cells
import eight_fits
import pytest
from eight_fits import FITS
from launch import asked_for

pytestmark = [pytest.mark.spark, pytest.mark.slow]
SCRIPT = Path(eight_fits.__file__)


def fits(python: Path, *arguments: str | Path) -> dict[str, str]:
    done = subprocess.run(
        [python, SCRIPT, *arguments],
        env=cells.environment(python),
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout.splitlines()[-1])["digests"]


@pytest.fixture(scope="module")
def here(request, spark, tmp_path_factory) -> tuple[dict[str, str], Path]:
    """The digests of the installed Spark that this run asks for, and its checkpoint's folder."""
    only = {name for names in asked_for(request, "only") for name in names}
    folder = tmp_path_factory.mktemp("here")
    return eight_fits.digests(spark, folder, sorted(only)), folder


@pytest.mark.parametrize(
    ("cell", "only"),
    [
        ("spark-3.5", ("gang",)),
        ("spark-4.0", ("gang",)),
        *(pytest.param(cell, tuple(FITS), marks=pytest.mark.soak) for cell in cells.VERSIONS),
    ],
)
def test_same_bits(cell, only, here):
    """The last fit goes on from the checkpoint of the installed Spark."""
    digests, folder = here
    expected = {name: one for name, one in digests.items() if name in only or name not in FITS}
    assert fits(cells.build(cell), folder, "--resume", "--only", *only) == expected
