"""Arrays of a mini-batch become tensors on the replica's device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkdl.step.compute import to_tensors

ARRAYS = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.array([1, -2, 3], np.int16),
    np.array([0, 200, 255], np.uint8),
    np.array([True, False, True]),
]
DTYPES = [torch.float32, torch.int64, torch.uint8, torch.bool]


def test_signed_integers_become_int64_and_the_rest_stays() -> None:
    read_only = ARRAYS[0].copy()
    read_only.flags.writeable = False
    tensors = to_tensors([read_only, *ARRAYS[1:]], torch.device("cpu"))
    assert [tensor.dtype for tensor in tensors] == DTYPES
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in ARRAYS]
    tensors[0].zero_()
    assert read_only[2, 3] == 11


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_to_a_gpu_overlap_and_arrive() -> None:
    """Freed and reused at once, the pinned memory must not be overwritten before it is copied."""
    device = torch.device("cuda")
    sums = []
    for number in range(50):
        large = np.full((1 << 20,), number, np.float32)
        tensors = to_tensors([large, *ARRAYS], device)
        assert all(tensor.device.type == "cuda" for tensor in tensors)
        assert [tensor.dtype for tensor in tensors[1:]] == DTYPES
        sums.append(tensors[0].double().mean())
    assert [value.item() for value in sums] == list(range(50))
    assert [tensor.tolist() for tensor in tensors[1:]] == [array.tolist() for array in ARRAYS]
