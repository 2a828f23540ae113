"""What a replica sends to a slice: inf and NaN in it are found, and named by their parameter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparkdl.model.layout import layout_of
from sparkdl.slices.section import (
    Section,
    SectionLayout,
    first_not_finite,
    open_section,
    section_nbytes,
    write_gradients,
)
from sparkdl.slices.spec import SliceSpec, slice_specs

MODEL = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
LAYOUT = layout_of(MODEL)


def sections(gradients: list[torch.Tensor]) -> list[tuple[SliceSpec, Section]]:
    written = []
    for plan in slice_specs(LAYOUT, 2):
        section = SectionLayout(torch.float32)
        data = bytearray(section_nbytes(plan, torch.float32, section))
        contribution = open_section(plan, torch.float32, section, memoryview(data))
        write_gradients(LAYOUT, plan, gradients, {}, contribution)
        written.append((plan, contribution))
    return written


def found(gradients: list[torch.Tensor]) -> list[int]:
    numbers = [first_not_finite(plan, section) for plan, section in sections(gradients)]
    return [number for number in numbers if number is not None]


@given(
    number=st.integers(0, 3),
    place=st.integers(0),
    wrong=st.sampled_from([float("inf"), float("nan")]),
)
def test_a_wrong_element_is_found_wherever_it_is(number: int, place: int, wrong: float) -> None:
    gradients = [torch.ones_like(p) for p in MODEL.parameters()]
    gradients[number].view(-1)[place % gradients[number].numel()] = wrong
    assert found(gradients) == [number]


@pytest.mark.parametrize("value", [0.0, 1.0, 3e38, -3e38])
def test_finite_elements_are_finite_whatever_their_sum(value: float) -> None:
    assert found([torch.full_like(p, value) for p in MODEL.parameters()]) == []
