"""Histograms over fixed bins: numpy's counts, and parts that add up."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparkdl.slices.update import EDGES, Histogram

VALUES = arrays(
    np.float64,
    st.integers(1, 50),
    elements=st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1e-12, -1e-12, 1e4, -1e4, 5e-324]),
)


@given(VALUES)
def test_counts_are_numpys(values: np.ndarray) -> None:
    found = Histogram.of(torch.from_numpy(values))
    # numpy's last bin is closed, and ends in infinity here
    assert (found.counts == np.histogram(values, EDGES)[0]).all()
    assert found.counts.sum() == len(values)
    assert (found.smallest, found.largest) == (values.min(), values.max())
    assert found.total == pytest.approx(values.sum(), rel=1e-12, abs=1e-9)
    assert found.squares == pytest.approx((values**2).sum(), rel=1e-12)


@given(VALUES, st.lists(st.integers(0, 50), max_size=4))
def test_parts_add_up_to_the_whole(values: np.ndarray, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(c, len(values)) for c in cuts), len(values)]
    parts = [
        Histogram.of(torch.from_numpy(values[low:high])) for low, high in itertools.pairwise(bounds)
    ]
    joined, whole = Histogram.join(parts), Histogram.of(torch.from_numpy(values))
    assert (joined.counts == whole.counts).all()
    assert (joined.smallest, joined.largest) == (whole.smallest, whole.largest)
    assert joined.total == pytest.approx(whole.total, rel=1e-9, abs=1e-6)
    assert joined.squares == pytest.approx(whole.squares, rel=1e-9)


def test_edges_cover_everything_and_ascend() -> None:
    assert (np.diff(EDGES) > 0).all()
    assert (EDGES[0], EDGES[-1]) == (-math.inf, math.inf)
    assert len(EDGES) == 2 * 161 + 2
    assert np.array_equal(EDGES, -EDGES[::-1])


def test_only_finite_values_count() -> None:
    found = Histogram.of(torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0]))
    assert found.counts.sum() == 2
    assert (found.smallest, found.largest, found.total, found.squares) == (1.0, 2.0, 3.0, 5.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_dtype_and_shape(dtype: torch.dtype) -> None:
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = Histogram.of(values.requires_grad_())
    assert (found.counts == np.histogram(values.detach().double().numpy(), EDGES)[0]).all()
