"""The loss scale of fp16, against torch's own GradScaler."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.loop.advance import FIRST_SCALE, GROWTH_ITERATIONS, next_scale


@given(st.lists(st.booleans(), max_size=60), st.integers(0, GROWTH_ITERATIONS))
def test_it_moves_as_torchs(overflows: list[bool], age: int) -> None:
    """torch's update, with its default growth; below 1 ours does not fall."""
    scale = FIRST_SCALE
    torchs, tracker = torch.tensor(scale), torch.tensor(min(age, GROWTH_ITERATIONS - 1))
    tracker = tracker.int()
    age = int(tracker)
    for overflow in overflows:
        scale, age = next_scale(scale, age, overflow)
        found = torch.tensor(float(overflow))
        torch._amp_update_scale_(torchs, tracker, found, 2.0, 0.5, GROWTH_ITERATIONS)
        if float(torchs) < 1.0:
            assert scale == 1.0
            return
        assert (scale, age) == (float(torchs), int(tracker))


def test_the_defaults_are_torchs() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.get_scale() == FIRST_SCALE
    assert scaler.get_growth_interval() == GROWTH_ITERATIONS
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("state", "skipped", "expected"),
    [
        ((65536.0, 7), True, (32768.0, 0)),
        ((65536.0, 7), False, (65536.0, 8)),
        ((1.0, 0), True, (1.0, 0)),
        ((1.5, 0), True, (1.0, 0)),
        ((8.0, GROWTH_ITERATIONS - 2), False, (8.0, GROWTH_ITERATIONS - 1)),
        ((8.0, GROWTH_ITERATIONS - 1), False, (16.0, 0)),
        ((8.0, GROWTH_ITERATIONS - 1), True, (4.0, 0)),
    ],
)
def test_steps(state: tuple, skipped: bool, expected: tuple) -> None:
    assert next_scale(*state, skipped) == expected
