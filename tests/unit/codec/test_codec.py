"""Frames: what goes in comes out, and nothing else."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.codec.packed import as_tensor, decode, encode
from sparkdl.engines.shuffle.messages import GradientHeader

HEADERS = [
    None,
    (3, True),
    {"loss": 0.5},
    GradientHeader(2, 7, absent=frozenset({1})),
    "x" * 70_000,
]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.int64])
@pytest.mark.parametrize("length", [0, 1, 5, 1000])
def test_round_trip(header: object, dtype: torch.dtype, length: int) -> None:
    payload = torch.arange(length).to(dtype)
    found, body = decode(encode(header, payload) if length else encode(header))
    assert found == header
    assert len(body) == length * dtype.itemsize
    restored = as_tensor(body, dtype)
    assert restored.dtype == dtype
    torch.testing.assert_close(restored, payload, rtol=0, atol=0)


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=64), st.integers(0, 64))
def test_a_payload_keeps_its_bits_whatever_the_alignment(data: bytes, header_length: int) -> None:
    """NaNs with a payload, denormals, infinities: the header's length shifts them around."""
    padded = data + bytes(-len(data) % 4)
    values = torch.frombuffer(bytearray(padded), dtype=torch.float32) if padded else torch.empty(0)
    _, body = decode(encode("h" * header_length, values))
    assert bytes(body) == padded
    assert as_tensor(body, torch.float32).numpy().tobytes() == padded


def test_the_wire_form_is_length_header_payload() -> None:
    frame = encode(("a", 1), torch.tensor([1.5, -2.0]))
    head = pickle.dumps(("a", 1), protocol=pickle.HIGHEST_PROTOCOL)
    payload = np.array([1.5, -2.0], np.float32).tobytes()
    assert frame == len(head).to_bytes(4, "big") + head + payload


def test_a_gradient_with_grad_history_is_sent_as_it_is() -> None:
    tensor = torch.ones(3, requires_grad=True)
    _, body = decode(encode(0, tensor))
    assert as_tensor(body, torch.float32).tolist() == [1.0, 1.0, 1.0]


def test_tensors_share_the_memory_of_an_array() -> None:
    memory = np.zeros(16, np.uint8)
    tensor = as_tensor(memory, torch.float64)
    tensor[1] = 2.0
    assert memory.view(np.float64).tolist() == [0.0, 2.0]


def test_a_decoded_payload_is_a_view_of_the_frame() -> None:
    frame = encode("head", torch.arange(4.0))
    _, body = decode(frame)
    assert body.obj is frame
