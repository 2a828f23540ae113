"""Checkpoints of a state that is nothing but slices in memory: all that they ask of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trained import trained_model

import sparkdl
from sparkdl.checkpoint.manifest import DataIdentity, FieldIdentity, ModelIdentity, RunIdentity
from sparkdl.checkpoint.resume import ResumeCandidates
from sparkdl.checkpoint.save import Checkpointer
from sparkdl.data.fields import Field
from sparkdl.infer.outputs import Output
from sparkdl.infer.saved import manifest_of_model
from sparkdl.loop.engine import BEST, CURRENT, ReadState
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState, Validated
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import layout_of
from sparkdl.slices.spec import SliceSpec, SliceState, slice_specs


class Made(nn.Sequential):
    """A class of a user that a checkpoint names."""

    def __init__(self, *, width: int) -> None:
        if width != 8:
            raise ValueError(f"no such width: {width}")
        super().__init__(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


UNTRAINED = trained_model(
    Made(width=8),
    model=partial(Made, width=8),
    fields=(Field("x", "float32", (4,)),),
    output=Output((3,), "float32"),
)
LAYOUT = layout_of(UNTRAINED.module)
RUN = RunIdentity(
    model=ModelIdentity.of(LAYOUT),
    data=DataIdentity(
        rows=(7, 8),
        checksums=(2**64 - 1, 5),
        fields=(FieldIdentity(name="x", dtype="f4", shape=(4,)),),
    ),
    constants={"replicas": 2, "batch_size": 8, "local_steps": 1, "seed": 3},
    optimizers=("Adam",),
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

    def load(self, read: ReadState | None = None, which: str = CURRENT) -> None:
        assert read is not None
        self.versions[which] = [read(spec, LAYOUT.dtype) for spec in self.specs]
        for spec, state in zip(self.specs, self.versions[which], strict=True):
            assert state.weights.shape == (spec.length,)

    def map_slices(
        self, use: Callable[[int, SliceSpec, SliceState], Any], which: str = CURRENT
    ) -> list[Any]:
        pairs = zip(self.specs, self.versions[which], strict=True)
        return [use(i, spec, state) for i, (spec, state) in enumerate(pairs)]

    def load_residuals(self, read: Callable[[int], Any]) -> None:
        self.residuals = {replica: read(replica) for replica in range(2)}

    def map_residuals(self, use: Callable[[int, Any], Any]) -> list[Any]:
        return [use(replica, kept) for replica, kept in self.residuals.items()]

    def whole(self, which: str, array: str = "") -> torch.Tensor:
        pairs = zip(self.specs, self.versions[which], strict=True)
        parts = [(state.arrays[array] if array else state.weights, s.length) for s, state in pairs]
        return torch.cat(
            [nn.functional.pad(part, (0, length - len(part))) for part, length in parts]
        )

    def plain(self) -> Any:
        """All of it, to compare."""
        versions = {which: list(map(vars, states)) for which, states in self.versions.items()}
        return without_tensors([versions, self.residuals])


def without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: without_tensors(item) for key, item in value.items()}
    return [*map(without_tensors, value)] if isinstance(value, list) else value


NAMES = ("exp_avg", "exp_avg_sq")


def noise(spec: SliceSpec, dtype: torch.dtype) -> SliceState:
    held = {fragment.number: NAMES for fragment in spec.parameters}
    rates = (0.1, [math.inf, None], {"a": 1})
    others = {number: {"step": torch.tensor(3.0), "rates": rates} for number in held}
    arrays = {name: torch.zeros(spec.trainable_length, dtype=dtype) for name in NAMES}
    for array in arrays.values():
        for fragment in spec.parameters:
            array[fragment.start : fragment.stop].normal_()
    return SliceState(torch.randn(spec.length, dtype=dtype), arrays, held, others)


def some_history() -> History:
    history = History()
    for i in range(1, 5):
        state = TrainState(
            iteration=i,
            samples=8 * i,
            loss=math.nan if i == 2 else 1 / i,
            seconds=1.5 * i,
            learning_rates=(0.1,),
            gradient_norm=None if i < 3 else 0.5,
            timings={"forward": 0.1 * i, "reduce": 0.2} if i > 1 else {"forward": 0.1},
        )
        history.append(state, 1 + i // 3)
    history.append_validation(Validated(iteration=4, epoch=2, metrics={"loss": 0.5, "top": 1.0}))
    return history


def written(root: Path) -> Store:
    """The slices of a run that has left a checkpoint in ``root``."""
    torch.manual_seed(1)
    store = Store(slices=3)
    store.load(noise)
    store.load(noise, which=BEST)
    store.residuals = {
        n: {0: {"left": torch.randn(8, 4)}, 2: {"q": torch.ones(3, 1)}} for n in (0, 1)
    }
    best = Validated(iteration=2, epoch=1, metrics={"loss": 0.5})
    state = TrainState(
        iteration=4, epoch=2, position=1, samples=32, seconds=1.5, validations=(best,), best=best
    )
    checkpointer = Checkpointer(
        sparkdl.Checkpoint(root),
        store,
        RUN,
        some_history(),
        model=manifest_of_model(UNTRAINED),
        begun=TrainState(),
    )
    checkpointer.check()
    assert checkpointer.finish(state).checkpoint is not None
    return store


@pytest.mark.parametrize("slices", [1, 2, 5])
def test_a_state_in_memory_is_written_and_read_with_another_cut(
    slices: int, tmp_path: Path
) -> None:
    store, other = written(tmp_path), Store(slices)
    restored = ResumeCandidates(None, tmp_path).restore(other, RUN)
    assert (restored.state.iteration, restored.state.position) == (4, 1)
    for which in (CURRENT, BEST):
        assert torch.equal(other.whole(which), store.whole(which))
        assert torch.equal(other.whole(which, "exp_avg"), store.whole(which, "exp_avg"))
    assert other.versions[CURRENT][0].others[0] == store.versions[CURRENT][0].others[0]
    assert without_tensors(other.residuals) == without_tensors(store.residuals)


ROWS = replace(RUN, data=replace(RUN.data, rows=RUN.data.rows[::-1]))
"""The run on other rows."""


@pytest.mark.parametrize(
    ("run", "how", "held", "told"),
    [
        (RUN, {}, True, 0),
        (RUN, {"any_data": True}, True, 0),
        (ROWS, {"any_data": True}, False, 1),
        (RUN, {"any_data": True, "passes": True, "batch": 3}, False, 0),
    ],
)
def test_replicas_go_on_with_what_they_held_on_the_same_rows(
    run: Any, how: dict[str, Any], held: bool, told: int, tmp_path: Path, caplog: Any
) -> None:
    """On others they begin without, and the log says so; each pass over a stream does."""
    store, other = written(tmp_path), Store(3)
    with caplog.at_level("WARNING", "sparkdl"):
        ResumeCandidates(None, tmp_path, **how).restore(other, run)
    assert without_tensors(other.residuals) == without_tensors(store.residuals if held else {})
    assert [text.startswith("its rows, or their division") for text in caplog.messages] == [
        True
    ] * told


def test_the_latest_is_not_the_beginning_where_all_are_damaged(tmp_path: Path) -> None:
    written(tmp_path)
    damaged = next(tmp_path.glob("*/slice-*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(sparkdl.CheckpointError, match=damaged.name):
        ResumeCandidates(sparkdl.Checkpoint(tmp_path), "latest").restore(Store(slices=2), RUN)


def test_a_run_of_another_optimizer_or_metric(tmp_path: Path) -> None:
    """The one cannot go on, and the other begins its best weights anew."""
    written(tmp_path)
    with pytest.raises(sparkdl.ParameterError, match="the optimizer is SGD here and Adam in the"):
        ResumeCandidates(None, tmp_path).restore(Store(2), replace(RUN, optimizers=("SGD",)))
    store = Store(slices=2)
    ResumeCandidates(None, tmp_path).restore(store, replace(RUN, metric="accuracy"))
    assert list(store.versions) == [CURRENT]
