"""Compressed gradients: what is sent and what stays behind are the gradient; each form comes back."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import message_of

from sparkdl import ParameterError, PowerSGD, TopK
from sparkdl.codec.packed import copy_packed, open_packed, packed_nbytes, specs_of
from sparkdl.slices.section import RESIDUAL, GradBucket, compress, decompress, largest

DTYPES = (torch.float32, torch.float64)
SHAPES = ((7,), (1, 1), (5, 3), (16, 24), (8, 3, 3, 3), (0, 4), ())
HOOKS = [TopK(0.01), TopK(0.3), TopK(1.0), PowerSGD(1), PowerSGD(3)]


def signs(bucket: GradBucket) -> dict[str, torch.Tensor]:
    """signSGD with one scale a tensor (Karimireddy et al., 2019)."""
    if not bucket.gradient.numel():
        return {"values": bucket.gradient}
    scale = bucket.gradient.abs().mean()
    return {"values": bucket.gradient.sign().to(torch.int8), "scale": scale}


def random_k(bucket: GradBucket) -> dict[str, torch.Tensor]:
    """Drawn anew each time; it counts how often it was called."""
    flat = bucket.gradient.reshape(-1)
    generator = torch.Generator().manual_seed(bucket.seed)
    chosen = torch.randperm(len(flat), generator=generator)[: len(flat) // 2]
    calls = bucket.state.get("calls", torch.zeros(1, dtype=torch.int64)) + 1
    return {"values": flat[chosen], "indices": chosen, "calls": calls}


def gradient_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from([*HOOKS, signs, random_k]),
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.sampled_from(["same", torch.bfloat16, torch.float16]),
    st.integers(0, 10**6),
)
def test_sent_and_left_out_are_the_gradient_and_what_was_left_out(hook, shape, dtype, wire, seed):
    wire, state, total, arrived = dtype if wire == "same" else wire, {}, 0.0, 0.0
    for t in range(4):
        gradient = gradient_of(shape, dtype, seed + t)
        before = state.get(RESIDUAL, torch.zeros(shape, dtype=dtype))
        bucket = GradBucket(name="w", gradient=gradient, state=state, iteration=t, seed=seed + t)
        sent, state = compress(hook, bucket, wire)
        dense = decompress(sent, shape, dtype)
        assert dense.shape == gradient.shape
        assert dense.dtype == dtype
        left_out = state.get(RESIDUAL, torch.zeros(shape, dtype=dtype))
        whole = gradient + before
        error = 4 * torch.finfo(dtype).eps * float(whole.abs().max() if whole.numel() else 0)
        assert torch.allclose(dense + left_out, whole, rtol=0, atol=error)
        if isinstance(hook, TopK) and wire == dtype:
            assert torch.equal(dense + left_out, whole)
        total, arrived = total + gradient, arrived + dense
    assert torch.allclose(arrived + left_out, total, rtol=0, atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=60),  # many of one size
    st.floats(0, 1),
    st.sampled_from(DTYPES),
)
def test_largest_are_the_largest_and_the_first_of_equals(numbers, share, dtype):
    count = max(1, round(share * len(numbers)))
    found = largest(torch.tensor(numbers, dtype=dtype), count).tolist()
    wanted = sorted(range(len(numbers)), key=lambda i: (-abs(numbers[i]), i))[:count]
    assert found == sorted(wanted)


@settings(deadline=None, max_examples=50)
@given(st.floats(0.001, 0.4), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_top_k_sends_the_largest_and_nothing_else(ratio, rows, columns, seed):
    gradient = gradient_of((rows, columns), torch.float32, seed)
    sent = TopK(ratio)(GradBucket(name="w", gradient=gradient))
    count = max(1, round(ratio * rows * columns))
    if count * 8 >= rows * columns * 4:
        assert torch.equal(sent["values"].view(rows, columns), gradient)
        return
    order = np.argsort(-gradient.abs().numpy().reshape(-1), kind="stable")[:count]
    assert sent["indices"].tolist() == sorted(order.tolist())
    assert torch.equal(sent["values"], gradient.view(-1)[sent["indices"].long()])
    assert sum(t.nbytes for t in sent.values()) == 8 * count


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from([(20, 30), (40, 11), (12, 4, 3, 3)]),
    st.integers(0, 99),
)
def test_power_sgd_of_a_matrix_of_low_rank_is_exact(rank, true_rank, shape, seed):
    rows, columns = shape[0], math.prod(shape[1:])
    left = gradient_of((rows, true_rank), torch.float64, seed)
    matrix = left @ gradient_of((columns, true_rank), torch.float64, seed + 1).T
    bucket = GradBucket(name="w", gradient=matrix.view(shape), seed=seed)
    sent = {n: t for n, t in PowerSGD(rank)(bucket).items() if n != "begin"}
    if rank * (rows + columns) < rows * columns:
        assert sent["left"].shape == (rows, rank)
        assert sent["right"].shape == (columns, rank)
        assert torch.allclose(
            sent["left"].T @ sent["left"], torch.eye(rank, dtype=torch.float64), atol=1e-12
        )
    back = decompress(sent, shape, torch.float64)
    if rank >= true_rank:
        assert torch.allclose(back, matrix.view(shape), rtol=0, atol=1e-9)


def test_power_sgd_goes_on_where_it_was():
    """Of one matrix again and again it comes to the best approximation of that rank."""
    matrix = gradient_of((30, 40), torch.float64, 3)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    best = float((matrix - (u[:, :2] * s[:2]) @ v[:2]).norm())
    hook, state, errors = PowerSGD(2, error_feedback=False), {}, []
    for t in range(60):
        bucket = GradBucket(name="w", gradient=matrix, state=state, seed=t)
        sent, state = compress(hook, bucket, torch.float64)
        errors.append(float((matrix - decompress(sent, matrix.shape, torch.float64)).norm()))
    assert errors[0] > 1.05 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_power_sgd_after_a_gradient_of_zeros():
    state, shape = {}, (30, 40)
    matrix = gradient_of((30, 1), torch.float64, 3) @ gradient_of((1, 40), torch.float64, 4)
    for gradient in (torch.zeros_like(matrix), matrix * 1e-30, matrix, matrix):
        bucket = GradBucket(name="w", gradient=gradient, state=state)
        sent, state = compress(PowerSGD(1), bucket, torch.float64)
        assert decompress(sent, shape, torch.float64).isfinite().all()
    total = 2 * matrix + matrix * 1e-30
    assert float(state.get(RESIDUAL, torch.zeros(1)).norm()) < 1e-9 * float(total.norm())


@pytest.mark.parametrize("hook", HOOKS)
def test_same_bits_again(hook):
    gradient = gradient_of((64, 48), torch.float32, 5)
    bucket = GradBucket(name="w", gradient=gradient, seed=8)
    first, second = (compress(hook, bucket, torch.float32) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    elsewhere = torch.empty(64 * 48 + 1)[1:].view(64, 48).copy_(gradient)  # not aligned
    sent, _ = compress(hook, replace(bucket, gradient=elsewhere), torch.float32)
    for name, tensor in first[0].items():
        moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        first[0][name] = moved.copy_(tensor)
    back = decompress(first[0], gradient.shape, torch.float32)
    assert torch.equal(back, decompress(sent, gradient.shape, torch.float32))


def test_what_is_not_finite_goes_as_it_is():
    state = {RESIDUAL: torch.ones(8, 8), "begin": torch.ones(8, 1)}
    for bad in (math.inf, math.nan):
        gradient = torch.ones(8, 8)
        gradient[2, 3] = bad
        bucket = GradBucket(name="w", gradient=gradient, state=state)
        sent, kept = compress(TopK(0.01), bucket, torch.float32)
        assert not sent["values"].isfinite().all()
        assert kept == state
    huge = torch.full((8, 8), 3e38)  # finite, but their sum is not
    sent, _ = compress(TopK(0.01), GradBucket(name="w", gradient=huge), torch.float32)
    assert sent["indices"].tolist() == [0]


def distance(hook) -> float:
    """From the optimum, of 1, after gradient descent with two replicas that differ in one large row:
    it is what each of them would send every time, and it cancels out in the mean."""
    scales = torch.logspace(-1, 0, 400, dtype=torch.float64).view(20, 20)
    own = torch.zeros(20, 20, dtype=torch.float64)
    own[0] = 1.5 * (-1.0) ** torch.arange(20)
    weights, states = torch.full((20, 20), 0.2, dtype=torch.float64), [{}, {}]
    for t in range(800):
        for replica, sign in enumerate((1, -1)):
            gradient = scales * weights + sign * own
            bucket = GradBucket(name="w", gradient=gradient, state=states[replica], seed=t)
            sent, states[replica] = compress(hook, bucket, torch.float64)
            weights = weights - 0.03 / 2 * decompress(sent, weights.shape, torch.float64)
    return float(weights.norm()) / 4


@pytest.mark.parametrize("kind", [partial(TopK, 0.05), partial(PowerSGD, 1)])
def test_error_feedback_is_what_makes_it_converge(kind):
    exact = distance(lambda bucket: {"values": bucket.gradient})
    fed_back, without = distance(kind()), distance(kind(error_feedback=False))
    assert exact < 0.05
    assert fed_back < 0.1
    assert without > 0.5


# Mistakes


@pytest.mark.parametrize("value", [0, -0.1, 1.01, math.nan, "0.1", True, None])
def test_a_ratio_or_a_rank_that_is_none(value):
    with pytest.raises(ParameterError, match=r"ratio=.*give a number above 0, at most 1"):
        TopK(value)
    with pytest.raises(ParameterError, match=r"rank=.*give a whole number of at least 1"):
        PowerSGD(value)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({}, 'nothing travels: it must be "values"'),
        ({"indices": torch.zeros(1)}, '"indices" travels'),
        ({"left": torch.zeros(4, 1)}, '"left" travels'),
        ({"values": torch.zeros(4), "left": torch.zeros(4, 1)}, '"values", "left" travels'),
        ({"values": torch.zeros(11)}, 'there are 11 "values" of 12, and no "indices"'),
        (
            {"values": torch.zeros(2), "indices": torch.zeros(3)},
            'there are 2 "values" and 3 "indices"',
        ),
        ({"values": torch.zeros(12), "scale": torch.ones(2)}, '"scale" has 2 elements'),
        (
            {"left": torch.zeros(3, 2), "right": torch.zeros(4, 2)},
            r'"left" is [3, 2] and "right" [4, 2]: they must be [4, r] and [3, r]',
        ),
    ],
)
def test_what_is_no_form(sent, said):
    assert said in message_of(ValueError, decompress, sent, (4, 3), torch.float32)


# Packing


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.integers(0, 9),
        st.dictionaries(
            st.sampled_from(["values", "indices", "left", "scale"]),
            st.tuples(
                st.sampled_from(["float32", "int8", "bfloat16", "int64", "bool"]),
                st.lists(st.integers(0, 5), max_size=3),
            ),
            max_size=3,
        ),
        max_size=4,
    )
)
def test_packed_tensors_come_back(wanted):
    tensors = {
        number: {
            name: torch.randint(0, 2, tuple(shape)).to(getattr(torch, kind))
            for name, (kind, shape) in named.items()
        }
        for number, named in wanted.items()
    }
    specs = specs_of(tensors)
    nbytes = packed_nbytes(specs)
    assert nbytes % 64 == 0
    memory = np.full(nbytes, 0xAB, np.uint8)
    copy_packed(open_packed(specs, memory), tensors)
    found = open_packed(specs, memory.tobytes())
    assert found.keys() == {number for number, named in tensors.items() if named}
    for number, named in found.items():
        for name, tensor in named.items():
            assert tensor.dtype == tensors[number][name].dtype
            assert torch.equal(tensor, tensors[number][name])
