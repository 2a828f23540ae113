"""What a process says of the model that it has built, beside the driver's."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sparkdl import ModelError
from sparkdl.process.determinism import seeded
from sparkdl.replica.compare import check_same, compared, describe


def make() -> nn.Module:
    with seeded(0):
        net = nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.Linear(40, 1).bfloat16())
    net[2].weight.requires_grad_(False)
    net.register_buffer("places", torch.arange(4), persistent=False)
    net.register_buffer("empty", torch.zeros(0), persistent=False)
    net.register_buffer("unset", torch.full((3,), torch.nan))
    return net


def told(change: Callable[[nn.Module], None]) -> str:
    there = make()
    with torch.no_grad():
        change(there)
    here = compared(make(), describe(make()))
    assert [here.form, here.values, here.rounding] == [""] * 3
    with pytest.raises(ModelError) as caught:
        check_same([compared(there, describe(make()))] * 2)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda net: setattr(net[0], "bias", None),
            '"0.bias" is a trained parameter [40] of float32 here, and missing there',
        ),
        (
            lambda net: net.register_buffer("more", torch.ones(1)),
            '"more" is missing here, and a buffer [1] of float32 there',
        ),
        (
            lambda net: net[0].bias.requires_grad_(False),
            '"0.bias" is a trained parameter [40] of float32 here, and a frozen parameter [40] of '
            "float32 there",
        ),
        (
            lambda net: net[2].float(),
            '"2.weight" is a frozen parameter [1, 40] of bfloat16 here, and a frozen parameter '
            "[1, 40] of float32 there",
        ),
        (
            lambda net: setattr(net[0], "weight", nn.Parameter(net[0].weight.reshape(5, 40))),
            '"0.weight" is a trained parameter [40, 5] of float32 here, and a trained parameter '
            "[5, 40] of float32 there",
        ),
        (
            lambda net: net[1].running_mean.add_(0.5),
            'the buffer "1.running_mean" [40] has other values here than there, 0 and 0.5 to begin',
        ),
        (
            lambda net: net.places.add_(1),
            'the buffer "places" [4] has other values here than there (replica 0)',
        ),
        (
            lambda net: net[2].weight.mul_(1.01),
            'the frozen parameter "2.weight" [1, 40] has other values here than there',
        ),
    ],
)
def test_a_difference_is_told(change: Callable[[nn.Module], None], said: str) -> None:
    assert said in told(change)


def test_last_bits_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    net = make()
    with torch.no_grad():
        net[0].weight.mul_(1 + 1e-7)
    with caplog.at_level(logging.WARNING, "sparkdl"):
        check_same([compared(make(), describe(make()))])
        assert not caplog.messages
        check_same([compared(net, describe(make()))] * 2)
    (message,) = caplog.messages
    assert "differ slightly" in message
    assert '"0.weight"' in message


def test_executors_that_differ_from_each_other_are_an_error() -> None:
    net = make()
    with torch.no_grad():
        net[0].weight.mul_(1 + 1e-7)
    with pytest.raises(ModelError, match="different initial weights in different processes"):
        check_same([compared(one, describe(make())) for one in (net, make())])
