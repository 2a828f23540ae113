"""An update in blocks gives the bits of one in a piece, whatever the blocks and the policy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_optimizers import ScheduleFree
from test_apply import parts_of
from test_plan import layouts
from torch import nn, optim

from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.flat import Layout
from sparkdl.slices import update as owner_module
from sparkdl.slices.section import Section
from sparkdl.slices.spec import SliceSpec, SliceState, slice_specs
from sparkdl.slices.update import Histogram, SliceUpdater, cut_blocks

Histograms = Mapping[tuple[str, int], Histogram]
quick = settings(deadline=None, max_examples=60)


@quick
@given(layouts(), st.integers(1, 4), st.integers(1, 6).map(lambda k: 64 * k))
def test_blocks_cover_a_slice_and_its_pieces(layout: Layout, slices: int, elements: int) -> None:
    for plan in slice_specs(layout, slices):
        blocks = cut_blocks(plan, elements)
        assert [b.start for b in blocks] == [plan.start, *(b.stop for b in blocks[:-1])]
        assert blocks[-1].stop == plan.stop
        assert all(block.length <= elements for block in blocks[:-1])
        places = [
            (p.number, block.start - plan.start + p.start + i)
            for block in blocks
            for p in block.fragments
            for i in range(p.length)
        ]
        assert places == [(p.number, p.start + i) for p in plan.fragments for i in range(p.length)]


class Net(nn.Module):
    """Sizes that blocks of 64 and 128 cut in many ways, a sparse table and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(17, 29)
        self.norm = nn.BatchNorm1d(29)
        self.last = nn.Linear(29, 5)
        self.table = nn.Embedding(7, 3, sparse=True)


def optimizers(dense: Any, other: Any, module: Any) -> list[optim.Optimizer]:
    """One for some of the dense parameters, one for the others, one for the table."""
    parameters = [p for name, p in module.named_parameters() if not name.startswith("table")]
    return [dense(parameters[:3]), other(parameters[3:]), optim.SparseAdam([module.table.weight])]


SGD, MOMENTUM = partial(optim.SGD, lr=0.1), partial(optim.SGD, lr=0.1, momentum=0.9)
MAKES = {
    "sgd": partial(optimizers, SGD, SGD),
    "momentum": partial(optimizers, partial(MOMENTUM, weight_decay=0.01), SGD),
    "adagrad": partial(optimizers, partial(optim.Adagrad, lr=0.1), optim.RMSprop),
    "adam": partial(optimizers, partial(optim.AdamW, lr=0.01), MOMENTUM),
    "schedule-free": partial(optimizers, partial(ScheduleFree, lr=0.1), SGD),
}
POLICIES = {
    "plain": TrainingOptions(),
    "ema": TrainingOptions(ema=0.9),
    "regularised": TrainingOptions(l1=0.01, l2={"*.weight": 0.1}),
    "clipped": TrainingOptions(clip_norm=0.1, clip_value=0.5, l1=0.01, l2={"*.weight": 0.1}),
}


def contributions(plan: SliceSpec, seed: int) -> list[Section]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        Section(
            replica,
            1.0 + replica,
            draw(plan.dense_length),
            draw(plan.length - plan.buffers_start),
            frozenset({2, seed}),
            {p.number: (torch.arange(p.shape[0]), draw(*p.shape)) for p in plan.tables},
        )
        for replica in range(2)
    ]


def train(
    make: Any, options: TrainingOptions, elements: int, in_place: bool, shown: bool
) -> tuple[SliceState, Histograms]:
    torch.manual_seed(0)
    flat, optimizer, (plan,) = parts_of(Net(), make, options)
    owner = SliceUpdater.of(plan, optimizer, options, flat.layout, separable=True)
    state = SliceState(flat.flat.clone())
    with mock.patch.object(owner_module, "BLOCK_ELEMENTS", elements):
        for step in range(3):
            given = contributions(plan, step)
            known, squares = None, [0.0]
            if owner.clips_norm:
                known = owner.reduce(given, state.weights, torch.empty(plan.dense_length))
                squares = [owner.squared_norm(known)]
            old, new = state, state
            if not in_place:
                old = copy.deepcopy(state)
                new = copy.deepcopy(state)
                for array in (new.weights, *new.arrays.values()):
                    array.fill_(float("nan"))
            fragments = plan.parameters if shown else ()
            before = copy.deepcopy(old)
            updated = owner.update(
                old, new, given, None, known=known, squares=squares, shown=fragments
            )
            if not in_place:
                assert torch.equal(old.weights, before.weights)
                assert torch.equal(
                    torch.cat([*old.arrays.values(), torch.empty(0)]),
                    torch.cat([*before.arrays.values(), torch.empty(0)]),
                )
            state = new
    assert (len(owner.blocks) > 1) == (elements < plan.length)
    return state, updated.histograms


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("options", POLICIES)
@settings(deadline=None, max_examples=6)
@given(st.integers(1, 12).map(lambda k: 64 * k), st.booleans(), st.booleans())
def test_blocks_do_not_change_a_bit(
    make: str, options: str, elements: int, in_place: bool, shown: bool
) -> None:
    one, whole = train(MAKES[make], POLICIES[options], 1 << 20, True, True)
    other, found = train(MAKES[make], POLICIES[options], elements, in_place, shown)
    assert torch.equal(one.weights, other.weights)
    assert one.arrays.keys() == other.arrays.keys()
    assert all(torch.equal(one.arrays[name], other.arrays[name]) for name in one.arrays)
    assert one.held == other.held
    assert one.others == other.others
    assert found.keys() == (whole.keys() if shown else set())
    for key in found:
        assert np.array_equal(found[key].counts, whole[key].counts)
        assert found[key].total == whole[key].total


def test_an_optimizer_that_looks_at_whole_tensors_gets_them() -> None:
    flat, optimizer, (plan,) = parts_of(Net(), MAKES["adam"])
    with mock.patch.object(owner_module, "cut_blocks", partial(cut_blocks, elements=64)):
        assert SliceUpdater.of(plan, optimizer, TrainingOptions(), flat.layout).blocks == [plan]
        local = SliceUpdater.of(
            plan, optimizer, TrainingOptions(local_steps=2), flat.layout, separable=True
        )
        assert local.blocks == [plan]


class Late(torch.optim.SGD):
    """Draws from its second step on: no trial of a few steps need show it."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            steps = self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            if steps > 1:
                p.add_(torch.randn_like(p))


def test_what_is_drawn_follows_the_seed() -> None:
    """Whatever else has been drawn, or found about the optimizer; each block has draws of its own."""
    ends = []
    for seeds in ((1, 2), (1, 2), (1, 3)):
        torch.manual_seed(len(ends))
        module = nn.Linear(16, 16, bias=False)
        module.weight.data.zero_()
        flat, optimizer, (plan,) = parts_of(module, partial(Late, lr=0.1))
        owner = SliceUpdater.of(plan, optimizer, TrainingOptions(), flat.layout, separable=True)
        state = SliceState(flat.flat.clone())
        gradient = torch.zeros(plan.dense_length)
        with mock.patch.object(owner_module, "BLOCK_ELEMENTS", 64):
            for seed in seeds:
                given = [Section(0, 1.0, gradient, gradient[:0], frozenset())]
                owner.update(state, state, given, None, seed=seed)
        ends.append(state.weights)
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
    assert len(set(ends[0].tolist())) == 256
