"""An iteration goes through the functions that docs/architecture.md lists, in that order.

A trace of one iteration of each engine is compared with the page's tables: all of it on the driver, and
of what tasks do that which the local engine does in the same process.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest
import torch
from launch import ROOT
from torch import nn

import sparkdl

PAGE = (ROOT / "docs" / "architecture.md").read_text()
MOST = 8
"""Functions a table, so that one can read them all."""


def path(title: str) -> list[set[str]]:
    """The functions of a table, row by row; several in a row are alternatives or belong together."""
    table = PAGE.split(f"**{title}")[1].split("\n\n")[1]
    cells = [line.split("|")[2] for line in table.splitlines()[2:]]
    rows = []
    for cell in cells:
        names = re.findall(r"`([\w.]+)`", cell)
        owner = names[0].rpartition(".")[0]
        rows.append({*names, *(f"{owner}.{name}" for name in names if "." not in name and owner)})
    return rows


class Trace:
    """The functions of sparkdl that this thread calls in iteration 2, in order."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and "/sparkdl/" in code.co_filename:
            self.called.append(code.co_qualname)

    def iteration(self) -> list[str]:
        """From the second plan to what follows the third."""
        plans = [i for i, name in enumerate(self.called) if name == "Lookahead.plan"]
        return ["train", *self.called[plans[1] : plans[2]]]


def traced(data: Any, engine: str) -> list[str]:
    trainer = sparkdl.Trainer(
        model=nn.Linear(2, 1),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        clip_value=1.0,
        batch_size=8,
        stop=sparkdl.max_iteration(4),
        replicas=2,
        engine=engine,
    )
    trace = Trace()
    sys.setprofile(trace)
    try:
        trainer.fit(data)
    finally:
        sys.setprofile(None)
    return trace.iteration()


def assert_in_order(called: list[str], rows: Iterable[set[str]]) -> None:
    place = 0
    for row in rows:
        found = [i for i in range(place, len(called)) if called[i] in row]
        assert found, f"{row} is not called after {called[max(0, place - 1)]}"
        place = found[0]


@pytest.fixture(scope="module")
def traces(spark: Any) -> dict[str, list[str]]:
    rows = [([float(i), 1.0], [float(i)]) for i in range(32)]
    data = spark.createDataFrame(rows, "features array<float>, label array<float>").coalesce(2)
    return {engine: traced(data, engine) for engine in ("local", "shuffle", "gang")}


@pytest.mark.spark
@pytest.mark.parametrize("engine", ["local", "shuffle", "gang"])
def test_on_the_driver(traces: dict[str, list[str]], engine: str) -> None:
    rows = path("Every engine, on the driver**")
    assert len(rows) <= MOST
    if engine == "local":
        rows = [row for row in rows if "RecoveringEngine.run" not in row]
    assert_in_order(traces[engine], rows)


@pytest.mark.spark
def test_in_the_shuffle_engine(traces: dict[str, list[str]]) -> None:
    rows = path("Shuffle, driver**")
    assert len(rows) <= MOST
    assert_in_order(traces["shuffle"], rows)


@pytest.mark.spark
def test_in_the_gang_engine(traces: dict[str, list[str]]) -> None:
    assert_in_order(traces["gang"], [{"GangEngine.run"}, {"InFlight.ask"}, {"InFlight.answer"}])


@pytest.mark.spark
@pytest.mark.parametrize(
    "table", ["Shuffle, replica task**", "Shuffle, slice task**", "Gang, rank**"]
)
def test_what_tasks_do_is_what_the_local_engine_does(
    traces: dict[str, list[str]], table: str
) -> None:
    rows, called = path(table), traces["local"]
    assert len(rows) <= MOST
    common = [row for row in rows if row & set(called)]
    assert len(common) >= {"Shuffle, replica task**": 3, "Shuffle, slice task**": 3}.get(table, 2)
    assert_in_order(called, common)
