"""Sections between ranks: a head that says how to read them, without pickle. No Spark, no peers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparkdl.codec.packed import TensorSpec, aligned, open_packed, packed_nbytes
from sparkdl.engines.gang.snapshots import pack_kept, unpack_kept
from sparkdl.engines.gang.strategies.ddp import head_of, open_parcel
from sparkdl.model.flat import layout_of
from sparkdl.slices.section import SectionLayout, open_section, section_nbytes
from sparkdl.slices.spec import slice_specs

pytestmark = pytest.mark.gang
LAYOUT = layout_of(
    nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.EmbeddingBag(9, 3, sparse=True))
)
(PLAN,) = slice_specs(LAYOUT, 1)
TABLE = next(n for n, segment in enumerate(LAYOUT.segments) if segment.sparse)

names = st.text(st.characters(codec="utf-8"), max_size=8)
specs = st.builds(
    TensorSpec,
    st.just(0),
    names,
    st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
)
maps = st.builds(
    SectionLayout,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([{}, {TABLE: 0}, {TABLE: 4}]),
    compressed=st.none() | st.lists(specs, max_size=3, unique_by=lambda s: s.name).map(tuple),
)


@given(maps, st.frozensets(st.integers(0, 5)), st.integers(0, 2**32 - 1))
def test_what_is_opened_is_what_was_sent(section, absent, seed):
    data = np.random.default_rng(seed).integers(
        0, 256, section_nbytes(PLAN, LAYOUT.dtype, section), np.uint8
    )
    head = head_of(section, absent)
    assert len(head) == aligned(len(head))
    parcel = torch.from_numpy(np.concatenate([np.frombuffer(head, np.uint8), data]))
    found = open_parcel(PLAN, LAYOUT.dtype, parcel)
    expected = open_section(PLAN, LAYOUT.dtype, section, data, absent=absent)
    assert found.absent == absent
    for name in ("gradient", "buffers", "tables", "compressed"):
        same(getattr(found, name), getattr(expected, name))


def same(one: Any, other: Any) -> None:
    """To the byte: not-a-numbers too."""
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys()
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, tuple):
        for left, right in zip(one, other, strict=True):
            same(left, right)
    else:
        assert one is None
        assert other is None


@given(
    st.none() | st.lists(specs, max_size=4, unique_by=lambda s: s.name), st.integers(0, 2**32 - 1)
)
def test_what_a_rank_keeps_survives_a_snapshot(specs, seed):
    kept = None
    if specs is not None:
        data = np.random.default_rng(seed).integers(0, 256, packed_nbytes(specs), np.uint8)
        kept = open_packed(specs, data)
    same(unpack_kept(pack_kept(kept)), kept)


def test_a_head_that_is_cut_short_is_an_error():
    head = head_of(SectionLayout(torch.float32), frozenset())
    with pytest.raises(json.JSONDecodeError):
        open_parcel(PLAN, LAYOUT.dtype, torch.frombuffer(bytearray(head[:20]), dtype=torch.uint8))
