"""The engines are one: the same loss curve within 1e-5 on seven models, with three replicas.

Torch sums the gradients of three ranks in an order of its own, so here bits may differ; not where
they travel compressed, and the ranks sum them.
"""

from __future__ import annotations

from pathlib import Path

import contract
import pytest
from launch import asked_for, launch, soak_but

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.slow]


RUNS = [run for run in contract.runs() if run[1] != "local"]
QUICK = [run for run in RUNS if run[0] in ("conv", "chain") or run == ("compressed", "gang, zero1")]
"""What is always tried; the others soak."""


@pytest.fixture(scope="module")
def losses(request, tmp_path_factory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("contract")
    master, runs = f"local[{contract.REPLICAS}]", asked_for(request, "model", "engine")
    return launch(Path(contract.__file__), folder, master=master, runs=runs)


@pytest.mark.parametrize(("model", "engine"), soak_but(QUICK, RUNS))
def test_the_loss_curve_is_that_of_one_process(losses, model, engine):
    expected = losses[f"{model}: local"]
    assert len(expected) == 2 * contract.ROWS / 18
    assert losses[f"{model}: {engine}"] == pytest.approx(expected, rel=0, abs=1e-5)
    assert model != "compressed" or losses[f"{model}: {engine}"] == expected
    assert len(set(expected)) == len(expected)
