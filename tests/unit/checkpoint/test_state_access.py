"""Checkpoints of a state that is nothing but slices in memory: all that they ask of an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.checkpoint.identity import DataIdentity, ModelIdentity
from sparkdl.checkpoint.manifest import RunIdentity
from sparkdl.checkpoint.resume import ResumeCandidates
from sparkdl.checkpoint.save import Checkpointer
from sparkdl.loop.engine import BEST, CURRENT, ReadState
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState, Validated
from sparkdl.model.layout import layout_of
from sparkdl.model.options import TrainingOptions
from sparkdl.slices.spec import SliceSpec, slice_specs
from sparkdl.slices.state import SliceState

LAYOUT = layout_of(nn.Linear(40, 3))
RUN = RunIdentity(
    model=ModelIdentity.of(LAYOUT),
    data=DataIdentity(rows=(8, 8), checksums=(1, 2), fields=()),
    constants={"replicas": 2, "batch_size": 4, "local_steps": 1, "seed": 0},
    optimizers=("Adagrad",),
    options=TrainingOptions(),
    metric="loss",
    compression="a hook",
)


class Store:
    """The slices of a run with ``slices`` slices, and what two replicas keep."""

    def __init__(self, slices: int) -> None:
        self.specs = slice_specs(LAYOUT, slices)
        self.versions: dict[str, list[SliceState]] = {}
        self.residuals: dict[int, Any] = {}

    def load(
        self,
        read: ReadState | None = None,
        reported: tuple[type[Exception], ...] = (),
        which: str = CURRENT,
    ) -> None:
        assert read is not None
        self.versions[which] = [read(spec, LAYOUT.dtype) for spec in self.specs]

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        pairs = zip(self.specs, self.versions[which], strict=True)
        return [use(i, spec, state) for i, (spec, state) in enumerate(pairs)]

    def load_residuals(
        self, read: Callable[[int], Any], reported: tuple[type[Exception], ...] = ()
    ) -> None:
        self.residuals = {replica: read(replica) for replica in range(2)}

    def map_residuals(self, use: Callable[[int, Any], Any]) -> list[Any]:
        return [use(replica, kept) for replica, kept in self.residuals.items()]

    def whole(self, which: str, array: str = "") -> torch.Tensor:
        states = self.versions[which]
        return torch.cat([state.arrays[array] if array else state.weights for state in states])


def noise(spec: SliceSpec, dtype: torch.dtype) -> SliceState:
    held = {fragment.number: ("sum",) for fragment in spec.parameters}
    others = {number: {"step": torch.tensor(3.0)} for number in held}
    arrays = {"sum": torch.randn(spec.trainable_length, dtype=dtype)}
    return SliceState(torch.randn(spec.length, dtype=dtype), arrays, held, others)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Store, sparkdl.Checkpoint]:
    torch.manual_seed(1)
    store, settings = Store(slices=3), sparkdl.Checkpoint(tmp_path)
    store.load(noise)
    store.load(noise, which=BEST)
    store.residuals = {n: {0: {"left out": torch.randn(5)}} for n in range(2)}
    best = Validated(iteration=2, epoch=1, metrics={"loss": 0.5})
    state = TrainState(iteration=3, epoch=0, position=3, samples=12, validations=(best,), best=best)
    history = History()
    history.append(state, 1)
    checkpointer = Checkpointer(settings, store, RUN, history, model={}, begun=TrainState())
    checkpointer.check()
    assert checkpointer.finish(state).checkpoint is not None
    return store, settings


@pytest.mark.parametrize("slices", [1, 2, 5])
def test_a_state_in_memory_is_written_and_read_with_another_cut(
    written: tuple[Store, sparkdl.Checkpoint], slices: int
) -> None:
    store, settings = written
    other = Store(slices)
    restored = ResumeCandidates(settings, "latest").restore(other, RUN)
    assert (restored.state.iteration, restored.state.position) == (3, 3)
    for which in (CURRENT, BEST):
        assert torch.equal(other.whole(which), store.whole(which))
        assert torch.equal(other.whole(which, "sum"), store.whole(which, "sum"))
    assert other.versions[CURRENT][0].others[0]["step"] == 3
    for replica, kept in store.residuals.items():
        assert torch.equal(other.residuals[replica][0]["left out"], kept[0]["left out"])


def test_a_damaged_slice_is_told(written: tuple[Store, sparkdl.Checkpoint]) -> None:
    _, settings = written
    name = next(Path(settings.path).glob("*/slice-*.safetensors"))
    name.write_bytes(name.read_bytes()[:-1] + b"x")
    with pytest.raises(sparkdl.CheckpointError, match=name.name):
        ResumeCandidates(settings, "latest").restore(Store(2), RUN)
