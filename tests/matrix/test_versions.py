"""Eight fits, predictions and a pipeline have the same bits on every version of Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cells
import pytest
from eight_fits import FITS

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
def here(request, tmp_path_factory) -> tuple[dict[str, str], Path]:
    """The digests of the installed Spark that this run asks for, and its checkpoint's folder."""
    tests = [item for item in request.session.items if item.parent is request.node]
    only = {name for item in tests for name in item.callspec.params["only"]}
    folder = tmp_path_factory.mktemp("here")
    return fits(sys.executable, folder, "--only", *only), folder


@pytest.mark.parametrize(
    ("cell", "only"),
    [
        ("spark-3.5", ["shuffle, clipped by norm", "gang"]),
        ("spark-4.0", ["gang"]),
        *(pytest.param(cell, [*FITS], marks=pytest.mark.soak) for cell in cells.VERSIONS),
    ],
)
def test_same_bits(cell, only, here, tmp_path):
    """The last fit goes on from the checkpoint of the installed Spark."""
    digests, folder = here
    expected = {name: one for name, one in digests.items() if name in only or name not in FITS}
    assert fits(cells.build(cell), tmp_path, "--resume", folder, "--only", *only) == expected
