"""How a chain of modules is cut into stages, and a mini-batch into micro-batches."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparkdl.model.buffers import TrainingOptions
from sparkdl.parallel.base import Mesh
from sparkdl.parallel.pipeline import Pipeline, balanced, bounds_of, micro_batches
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.parallel.trace import chain_of


@given(st.lists(st.floats(0.5, 100), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_less_costly_most_costly_part(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    starts = balanced(costs, parts)

    def worst(cut: tuple[int, ...]) -> float:
        ends = [*cut, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))

    assert starts[0] == 0
    assert len(starts) == parts
    assert all(a < b for a, b in itertools.pairwise([*starts, len(costs)]))
    others = itertools.combinations(range(1, len(costs)), parts - 1)
    assert worst(tuple(starts)) == pytest.approx(min(worst((0, *other)) for other in others))


@given(st.integers(1, 100), st.integers(1, 6), st.integers(1, 9))
def test_micro_batches_are_every_row_once_in_nearly_equal_parts(rows, accumulate, count):
    runs = micro_batches(rows, accumulate, count)
    ends = [(start, start + each * many) for start, each, many in runs]
    assert ends[0][0] == 0
    assert ends[-1][1] == rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    sizes = {each for _, each, _ in runs}
    if accumulate == 1:
        assert max(sizes) - min(sizes) <= 1
        assert sum(many for *_, many in runs) == min(rows, count)
    assert min(sizes) >= 1


def test_no_rows_are_no_micro_batches():
    assert micro_batches(0, 2, 4) == []


def test_the_ranks_of_a_copy_have_one_mini_batch():
    plan = ParallelPlan({"pipe": Pipeline(micro_batches=2)}, Mesh(data=2, pipe=2))
    assert [plan.pass_sizes(rows, 1) for rows in (5, 2)] == [{2, 3}, {1}]


def test_blocks_are_flattened_and_other_modules_are_not():
    block = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.ReLU()))
    layer = nn.TransformerEncoderLayer(4, 2)
    chain = chain_of(nn.Sequential(block, layer, nn.Sequential()))
    assert [name for name, _ in chain] == ["0.a", "0.b", "1", "2"]


def test_a_block_with_a_hook_is_called_whole():
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    block.register_forward_hook(lambda *_: None)
    assert [name for name, _ in chain_of(nn.Sequential(block, nn.ReLU()))] == ["0", "1"]


def test_stages_have_equal_work_not_equal_parameters():
    """The convolution has 600 times the operations of the last layer, and fewer parameters."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 100),
    ).train()
    inputs = [torch.zeros(2, 3, 16, 16)]
    assert Pipeline().planned(module, inputs, Mesh(pipe=2), TrainingOptions()).split == ("2",)
    assert module.training
    named = Pipeline(split=["5"]).planned(module, inputs, Mesh(pipe=2), TrainingOptions())
    assert bounds_of(named, chain_of(module)) == [0, 5, 6]
    assert Pipeline().planned(module, inputs, Mesh(pipe=1), TrainingOptions()).split == ()


class Hidden(nn.LSTM):
    """What it puts out for each place, alone."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(rows)[0]


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: Hidden(8, 8, batch_first=True),
    ],
    ids=["transformer", "LSTM"],
)
def test_the_work_of_fused_kernels_counts(layer):
    """Torch's own counter takes them for nothing: all layers would be in one stage."""
    module = nn.Sequential(*(layer() for _ in range(4)), nn.Linear(8, 8))
    fast, fused = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    split = (
        Pipeline().planned(module, [torch.zeros(2, 5, 8)], Mesh(pipe=2), TrainingOptions()).split
    )
    assert split == ("2",)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.backends.mkldnn.enabled == fused
