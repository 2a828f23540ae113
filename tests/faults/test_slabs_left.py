"""The end of a fit finds slabs wherever they are, also where no partition of it lies any more,
and makes none."""

from __future__ import annotations

from pathlib import Path

import leave_slabs as script
import pytest
from launch import launch

pytestmark = [
    pytest.mark.faults,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(300),
]


def test_slabs_go_from_every_executor_that_had_some(tmp_path):
    master = f"local-cluster[{script.EXECUTORS},1,1024]"
    found = launch(Path(script.__file__), tmp_path, master=master)
    assert found == {case: [script.EXECUTORS, 0] for case in script.CASES}
