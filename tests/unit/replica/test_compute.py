"""Arrays of a mini-batch become tensors on the replica's device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.replica.compute import MiniBatch, buffers_kept, forward_backward, to_tensors
from sparkdl.replica.iteration import Clock

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


COUNTS = torch.tensor([7.0, 0, 5, 9, 0, 1, 0, 0])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3, 8])
def test_a_sum_goes_backward_as_large_as_a_mean(accumulate: int, streams: bool) -> None:
    """So that it needs no other loss scale in fp16, which ends at 65,504."""
    largest: list[float] = []

    def loss(output: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output.register_hook(lambda gradient: largest.append(float(gradient.abs().max())))
        return (output[:, 0] * counts).sum(), counts.sum()

    torch.manual_seed(0)
    recipe = Recipe(
        torch.nn.Linear(3, 1), loss, torch.optim.SGD, 0, TrainingOptions(accumulate=accumulate)
    )
    live, inputs, scale = LiveReplica.of(recipe), torch.randn(8, 3), 2.0**16
    batch, given = MiniBatch([inputs], [COUNTS]), dict[int, torch.Tensor]()
    sink = given.__setitem__ if streams else None
    passed = forward_backward(live, batch, 0, scale, Clock(), sink)
    for number, (_, parameter) in enumerate(live.flat.parameters):
        if parameter.grad is not None:
            given[number] = parameter.grad
    assert passed.weight == COUNTS.sum()
    assert max(largest) <= 1.01 * scale * float(COUNTS.max() / COUNTS[0])
    mean = (live.flat.module(inputs)[:, 0] * COUNTS).sum() / COUNTS.sum()
    assert passed.loss == pytest.approx(mean.item(), rel=1e-6)
    wanted = torch.autograd.grad(mean, [p for _, p in live.flat.parameters])
    for number, right in enumerate(wanted):
        torch.testing.assert_close(given[number], right)


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


def test_buffers_are_as_they_were_after_a_trial() -> None:
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("cache", torch.zeros(3))
    module.register_buffer("repeated", torch.ones(1).expand(2))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with buffers_kept(module):
        module(torch.randn(4, 2))
        module.cache = torch.ones(5)
    found = dict(module.named_buffers())
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)
