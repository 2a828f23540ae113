"""The ranks of a node build a model that is cut in turn."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gang_training import CLASSES, WIDTH, trainer_of, without_norm
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl.engines.gang.model_group import BuildLock

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def noted(folder: Path) -> nn.Module:
    """It notes from when to when it is built, and by which process."""
    began = time.monotonic()
    module = without_norm()
    time.sleep(0.2)
    (folder / f"{began}").write_text(json.dumps([began, time.monotonic(), os.getpid()]))
    return module


@pytest.mark.parametrize(
    "strategy", ["tensor", sparkdl.Pipeline(micro_batches=1)], ids=lambda one: str(one)[:8]
)
def test_no_two_ranks_build_at_once(parts: Any, tmp_path: Path, strategy: Any) -> None:
    make = partial(noted, tmp_path)
    run = trainer_of(model=make, strategy=strategy, stop=sparkdl.max_iteration(1))
    trained = run.fit(parts(8, 8))
    assert len(trained.history.losses) == 1
    notes = sorted(json.loads(note.read_text()) for note in tmp_path.iterdir())
    builds = [note for note in notes if note[2] != os.getpid()]
    assert len({process for *_, process in builds}) == 2
    assert len(builds) == 4  # each to compare what it begins with, and to train; "tensor" too
    for one, next_one in itertools.pairwise(builds):
        assert one[1] <= next_one[0]


WIDE = 4096
WIDE_BYTES = 4 * WIDE * WIDE


class Noting(nn.Sequential):
    """Notes from when to when an instance is unpickled, by which process, and what the processes that
    have noted something then have in memory."""

    def __init__(self, folder: Path) -> None:
        wide = nn.Linear(WIDE, WIDE, bias=False)
        super().__init__(nn.Linear(WIDTH, WIDE), wide, nn.Linear(WIDE, CLASSES))
        self.folder = folder

    def __reduce__(self) -> Any:
        return _opened, (self.folder,), vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        time.sleep(0.2)
        found = {"began": self.began, "ended": time.monotonic(), "process": os.getpid()}
        note = self.folder / f"{self.began}"
        note.write_text(json.dumps({**found, "memory": self.memory}))


def _opened(folder: Path) -> Noting:
    """The first thing that an unpickling calls."""
    module = Noting.__new__(Noting)
    nn.Module.__init__(module)
    began = time.monotonic()
    (folder / f"process-{os.getpid()}").touch()
    processes = [path.name.partition("-")[2] for path in folder.glob("process-*")]
    memory = {process: _resident(process) for process in processes}
    object.__setattr__(module, "began", began)
    object.__setattr__(module, "memory", memory)
    return module


def _resident(process: str) -> int:
    """Bytes that are this process's alone."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@pytest.mark.linux
def test_a_module_is_unpickled_in_turn_and_let_go_of(parts: Any, tmp_path: Path) -> None:
    module, rows = Noting(tmp_path), parts(8, 8)
    stop = sparkdl.max_iteration(1)
    trained = trainer_of(model=module, strategy="fsdp", stop=stop).fit(rows)
    assert len(trained.history.losses) == 1
    notes = [json.loads(note.read_text()) for note in tmp_path.iterdir() if "-" not in note.name]
    ranks = sorted((n for n in notes if n["process"] != os.getpid()), key=lambda n: n["began"])
    assert len(ranks) == 4  # each to compare what it begins with, and to train
    for one, next_one in itertools.pairwise(ranks):
        assert one["ended"] <= next_one["began"]
    begins: dict[str, int] = {}
    for note in ranks:
        for process, memory in note["memory"].items():
            if (grown := memory - begins.setdefault(process, memory)) > WIDE_BYTES / 4:
                assert (
                    note in ranks[3:]
                )  # what the first one trains: its half, as it is and as a vector
                assert grown < 1.75 * WIDE_BYTES


def test_a_turn_may_end_early(tmp_path):
    with BuildLock(tmp_path) as first:
        first.release()
        with BuildLock(tmp_path):
            first.release()
