"""A module and its flat vector: where everything lies, and that one follows the other."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import message_of
from torch import nn
from torch.ao.quantization.observer import MinMaxObserver, MovingAverageMinMaxObserver

from sparkdl.codec.packed import ALIGNMENT
from sparkdl.errors import ModelError
from sparkdl.model.buffers import check_rules
from sparkdl.model.flat import FlatModule, Layout, TensorRange, layout_of


def names(layout: Layout, kind: str) -> list[str]:
    return [segment.name for segment in layout.segments if segment.kind == kind]


class Buffers(nn.Module):
    """One parameter and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.tensor([0.5, -1.5, float("inf")]))
        self.register_buffer("low", torch.tensor([0.5, 1.0], dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(2**53 + 1))
        self.register_buffer("mask", torch.tensor([[True, False, True]]))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("long", torch.tensor([-1, 2**62 + 3], dtype=torch.int64))
        self.register_buffer("waves", torch.tensor([1.5 - 2.5j]))
        self.register_buffer("empty", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("hidden", torch.tensor([7.0]), persistent=False)


# The layout


def test_parameters_come_first_then_buffers() -> None:
    layout = layout_of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    assert layout.segments == (
        TensorRange("0.weight", "parameter", 0, 6, (2, 3), torch.float32),
        TensorRange("0.bias", "parameter", 16, 2, (2,), torch.float32),
        TensorRange("1.weight", "parameter", 32, 2, (2,), torch.float32),
        TensorRange("1.bias", "parameter", 48, 2, (2,), torch.float32),
        TensorRange("1.running_mean", "average", 64, 2, (2,), torch.float32, rule="mean"),
        TensorRange("1.running_var", "average", 80, 2, (2,), torch.float32, rule="mean"),
        TensorRange("1.num_batches_tracked", "exact", 96, 2, (), torch.int64),
    )
    assert (layout.dtype, layout.size, layout.nbytes) == (torch.float32, 112, 448)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_segments_are_aligned_and_apart(shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    module = nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in shapes])
    layout = layout_of(module)
    assert layout.dtype == dtype
    assert [segment.shape for segment in layout.segments] == shapes
    assert all(segment.length == segment.shape[0] * segment.shape[1] for segment in layout.segments)
    assert all(segment.start * dtype.itemsize % ALIGNMENT == 0 for segment in layout.segments)
    edges = [(segment.start, segment.stop) for segment in layout.segments]
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(edges))
    assert edges[-1][1] <= layout.size
    assert layout.size * dtype.itemsize % ALIGNMENT == 0


def test_kinds_of_buffers() -> None:
    layout = layout_of(Buffers())
    assert names(layout, "average") == ["mean", "low", "hidden"]
    assert names(layout, "exact") == ["count", "mask", "bytes", "long", "waves", "empty"]
    lengths = {segment.name: segment.length for segment in layout.segments}
    assert lengths == {
        "weight": 3, "mean": 3, "low": 2, "hidden": 1,
        "count": 2, "mask": 1, "bytes": 2, "long": 4, "waves": 2, "empty": 0,
    }  # fmt: skip


class OwnNorm(nn.BatchNorm1d):
    """A norm of a user's own, with a buffer more."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("seen", torch.zeros(()))


class Codes(nn.Module):
    sparkdl_buffers: ClassVar = {"codes": "sum", "inner.codes": "max"}

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.weight = inner or nn.Identity(), nn.Parameter(torch.zeros(2))
        self.register_buffer("codes", torch.zeros(2))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))


class Silent(Codes):
    sparkdl_buffers: ClassVar[dict[str, str]] = {}


STATISTICS = {"running_mean": "mean", "running_var": "mean", "num_batches_tracked": "first"}
RULES_OF: dict[str, tuple[nn.Module, dict[str, Any], dict[str, Any]]] = {
    "a norm of torch": (nn.BatchNorm2d(2), {}, STATISTICS),
    "a norm between ranks": (nn.SyncBatchNorm(2), {}, STATISTICS),
    "a norm of each row": (
        nn.Sequential(nn.InstanceNorm1d(2, affine=True, track_running_stats=True)),
        {},
        {f"0.{name}": rule for name, rule in STATISTICS.items()},
    ),
    "a norm that a user extends": (OwnNorm(), {}, {**STATISTICS, "seen": "first"}),
    "an observer": (
        nn.Sequential(nn.Linear(1, 1), MinMaxObserver(), MovingAverageMinMaxObserver()),
        {},
        {"1.min_val": "min", "1.max_val": "max", "2.min_val": "mean", "2.max_val": "mean"},
    ),
    "nothing": (Silent(), {}, {"codes": "first", "ready": "first"}),
    "its class": (Codes(), {}, {"codes": "sum", "ready": "first"}),
    "a module around it": (Codes(Silent()), {}, {"codes": "sum", "inner.codes": "max"}),
    "the innermost that does": (Codes(Codes()), {}, {"codes": "sum", "inner.codes": "sum"}),
    "the trainer, its first pattern": (
        nn.Sequential(Codes(Codes()), OwnNorm()),
        {"*.inner.codes": "min", "*codes": "mean", "*.running_var": "max", "*": "first"},
        {"0.codes": "mean", "0.inner.codes": "min", "1.running_var": "max", "1.seen": "first"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES_OF)
def test_who_says_how_replicas_agree_on_a_buffer(name: str) -> None:
    module, patterns, expected = RULES_OF[name]
    rules = {s.name: s.rule for s in layout_of(module, patterns).segments}
    assert {name: rules[name] for name in expected} == expected


NO_RULES: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "no such buffer": (Codes(), {"*.code": "first"}, 'buffers: no buffer matches "*.code".'),
    "no such rule of a class": (
        nn.Sequential(type("Odd", (Codes,), {"sparkdl_buffers": {"codes": "frist"}})()),
        {},
        '0.sparkdl_buffers: "codes" has the rule "frist": give "first", "mean", "min", "max", "sum", '
        'or a function of the stacked values. Did you mean "first"?',
    ),
    "no mapping of a class": (
        type("Odd", (Codes,), {"sparkdl_buffers": ["codes"]})(),
        {},
        "model.sparkdl_buffers: give a mapping from names, or patterns such as",
    ),
    "a mean of booleans": (
        Codes(),
        {"ready": "mean"},
        'the buffer "ready" has the rule "mean", but it is bool, which has no mean: give "first", '
        '"min", "max" or "sum".',
    ),
    "a sum of booleans": (
        Codes(),
        {"ready": "sum"},
        'it is bool: give "max" for any of the replicas',
    ),
    "an order of complex numbers": (Buffers(), {"waves": "max"}, "which has no order: give"),
    "a function that fails": (
        Codes(),
        {"codes": lambda values: values[2]},
        'the buffer "codes" has the rule a function, but it fails on two values [2, 2]: IndexError',
    ),
    "a function of another shape": (
        Codes(),
        {"codes": lambda values: values.sum()},
        "but it returned [] for values [2, 2]: return [2].",
    ),
}


@pytest.mark.parametrize("name", NO_RULES)
def test_a_rule_that_cannot_work_is_told(name: str) -> None:
    module, patterns, message = NO_RULES[name]
    assert message in message_of(ModelError, check_rules, module, patterns, gossip=False)


def test_gossip_knows_no_value_of_all_replicas() -> None:
    check_rules(Codes(), {"codes": "mean"}, gossip=True)
    assert "replicas with consistency=Gossip average with a few others" in message_of(
        ModelError, check_rules, Codes(), {}, gossip=True
    )
    wide = Silent()
    wide.codes = wide.codes.double()
    check_rules(wide, {"codes": "mean"}, gossip=False)
    assert 'it is wider than the parameters, and Gossip averages none such: give "first"' in (
        message_of(ModelError, check_rules, wide, {"codes": "mean"}, gossip=True)
    )


def test_of_a_sum_a_replica_sends_what_it_has_added() -> None:
    flat = FlatModule(Codes(), rules={"ready": "first"})
    flat.module.codes += 3
    flat.save_buffers(flat.flat)
    flat.module.codes += 4
    flat.module.ready.fill_(True)
    assert flat.buffers()[:2].tolist() == [4.0, 4.0]
    assert flat.buffers()[16:].view(torch.uint8)[:1].tolist() == [1]


def test_a_buffer_that_is_wider_than_the_vector_keeps_its_bits() -> None:
    module = nn.Linear(2, 2)
    epoch = torch.tensor([2_460_000.123456789, 1.0], dtype=torch.float64)
    module.register_buffer("epoch", epoch.clone())
    flat = FlatModule(module)
    assert names(flat.layout, "exact") == ["epoch"]
    module.epoch.zero_()
    flat.refresh()
    assert torch.equal(module.epoch, epoch)


def test_a_lazy_module_that_ran_once() -> None:
    module = nn.LazyLinear(3)
    module(torch.zeros(1, 2))
    assert layout_of(module).segments[0].shape == (3, 2)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.float32], torch.float32),
        ([torch.float64, torch.float32], torch.float64),
        ([torch.bfloat16], torch.float32),
        ([torch.float16, torch.float32], torch.float32),
    ],
)
def test_the_dtype_of_the_vector(dtypes: list[torch.dtype], expected: torch.dtype) -> None:
    module = nn.ParameterList([torch.ones(2, dtype=dtype) for dtype in dtypes])
    assert layout_of(module).dtype == expected
    assert FlatModule(module).flat.dtype == expected


NONE = (
    "the model has no trainable parameter: none of its {} parameters has requires_grad=True. Leave "
    "some out of freeze=, name some in unfreeze=, or add layers that have some."
)
SHARED = (
    'parameters "a" and "b" share memory but are two objects: to tie them, assign the same '
    "nn.Parameter to both places."
)
LAZY = (
    "is lazy and has no shape yet: give the layer its sizes, or let the function given as model= call "
    "the module once on an example."
)
NORM = nn.LazyBatchNorm1d(affine=False)
COMPLEX = "torch.complex64: only parameters of a real floating-point type can be trained."


def shared(*parts: slice) -> nn.Module:
    memory = torch.zeros(6)
    named = zip("ab", parts, strict=True)
    return nn.ParameterDict({name: nn.Parameter(memory[part]) for name, part in named})


ALIASED = (
    'buffer "kept" shares memory with the parameter "weight", and in training each has its own: let '
    "forward use the parameter, or register a .clone()."
)
SPARSE = (
    '"kept" is sparse (torch.sparse_{}), and what workers exchange is dense: make it dense, with '
    ".to_dense(). A constant may stay sparse as a plain attribute of the module, which forward moves "
    "to the device of its input."
)
EXPANDED = (
    'parameter "0" is an expanded tensor, whose elements share memory: make it '
    "nn.Parameter(tensor.clone(memory_format=torch.contiguous_format))."
)


def aliased(kept: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    module = nn.Linear(3, 2)
    made = kept(module.weight)
    if isinstance(made, nn.Parameter):
        module.register_parameter("kept", made)
    else:
        module.register_buffer("kept", made)
    return module


def constant_parameter(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(3, 2).requires_grad_(False), NONE.format(2)),
        (nn.ReLU, NONE.format(0)),
        (lambda: nn.LazyLinear(3), f'parameter "weight" {LAZY}'),
        (partial(nn.Sequential, nn.Linear(2, 2), NORM), f'buffer "1.running_mean" {LAZY}'),
        (lambda: nn.Linear(1, 1, dtype=torch.complex64), f'parameter "weight" is {COMPLEX}'),
        (lambda: shared(slice(0, 6), slice(3, 6)), SHARED),
        (lambda: shared(slice(0, 4), slice(3, 6)), SHARED),
        (lambda: aliased(lambda weight: weight.data), ALIASED),
        (lambda: aliased(lambda weight: weight.data[1]), ALIASED),
        (lambda: aliased(lambda weight: torch.eye(3).to_sparse()), SPARSE.format("coo")),
        (lambda: aliased(lambda weight: torch.eye(3).to_sparse_csr()), SPARSE.format("csr")),
        (lambda: aliased(constant_parameter), SPARSE.format("coo")),
        (lambda: nn.ParameterList([torch.zeros(1, 4).expand(3, 4)]), EXPANDED),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    assert message_of(ModelError, layout_of, make()) == message


def test_parts_of_one_memory_that_do_not_overlap_are_apart() -> None:
    flat = FlatModule(shared(slice(0, 3), slice(3, 6)))
    flat.flat.copy_(torch.arange(len(flat.flat)))
    assert [p.tolist() for _, p in flat.parameters] == [[0, 1, 2], [16, 17, 18]]


# Views


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_vector_holds_the_weights(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).to(dtype)
    before = copy.deepcopy(module.state_dict())
    flat = FlatModule(module)
    assert flat.flat.dtype == dtype
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    for segment, parameter in flat.parameters:
        expected = before[segment.name].reshape(-1)
        assert torch.equal(flat.flat[segment.start : segment.stop], expected)
        assert parameter.data_ptr() == flat.flat[segment.start :].data_ptr()
        step = ALIGNMENT // dtype.itemsize
        padding = flat.flat[segment.stop : -(-segment.stop // step) * step]
        assert not padding.any()


def test_parameters_compute_with_borrowed_values_until_they_are_given_back() -> None:
    flat = FlatModule(nn.Linear(3000, 2))
    (weight, parameter), (_, bias) = flat.parameters
    own, borrowed = bias.detach().clone(), torch.arange(6000.0)
    assert flat.borrow(0, borrowed)
    assert parameter.data_ptr() == borrowed.data_ptr()
    expected = borrowed.view(2, 3000).sum(1) + own
    assert torch.allclose(flat.module(torch.ones(1, 3000))[0], expected)
    flat.flat[weight.start : weight.stop] = 1.0
    assert flat.borrow(0, borrowed)
    assert flat.flat[weight.start : weight.stop].eq(1.0).all()  # forgotten once, not at every turn
    flat.give_back()
    assert parameter.eq(1.0).all()
    assert torch.equal(bias, own)
    flat.flat.zero_()
    assert not parameter.any()


def test_a_parameter_of_lower_precision_borrows_nothing() -> None:
    """It is a copy of another dtype."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    flat = FlatModule(module)
    numbers = {segment.name: n for n, (segment, _) in enumerate(flat.parameters)}
    assert flat.borrow(numbers["0.weight"], torch.ones(4))
    assert not flat.borrow(numbers["1.weight"], torch.ones(4))
    assert module[1].weight.dtype == torch.float16


def test_weights_in_another_memory_order_keep_their_values() -> None:
    module = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    image = torch.randn(1, 2, 4, 4)
    expected = module(image)
    flat = FlatModule(module)
    torch.testing.assert_close(module(image), expected)
    flat.flat.zero_()
    assert module.weight.abs().sum() == 0


# Buffers


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


@pytest.mark.parametrize("wide", [False, True])
def test_buffers_of_each_kind_go_through_the_vector(wide: bool) -> None:
    """Into one module's vector, out of another's."""
    source, target = Buffers(), Buffers()
    if wide:
        for module in (source, target):
            module.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    for name, buffer in target.named_buffers():
        target._buffers[name] = torch.zeros_like(buffer)
    vector = FlatModule(source).flat
    assert vector.dtype == (torch.float64 if wide else torch.float32)
    follower = FlatModule(target)
    follower.flat.copy_(vector)
    follower.refresh()
    for name, buffer in source.named_buffers():
        assert equal_bits(target.get_buffer(name), buffer), name


def test_a_buffer_keeps_its_memory_on_refresh() -> None:
    """Optimized graphs and other views of it stay right."""
    module = nn.BatchNorm1d(2)
    flat = FlatModule(module)
    mean = module.running_mean
    flat.flat[32:34] = 3.0
    flat.refresh()
    assert module.running_mean is mean
    assert mean.tolist() == [3.0, 3.0]


class Cache(nn.Module):
    """Its buffer is made anew where a batch is longer."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", torch.arange(2.0), persistent=persistent)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) > len(self.cache):
            self.cache = torch.arange(float(len(rows)))
        return self.weight * rows + self.cache[: len(rows), None]


@pytest.mark.parametrize("form", [torch.arange(5.0), torch.arange(2), None])
def test_a_cache_that_takes_another_form_is_left_alone(form: torch.Tensor | None) -> None:
    flat = FlatModule(Cache())
    begun = flat.flat.clone()
    flat.module.cache = form
    flat.module.mean = torch.ones(2)
    ends = flat.buffers()
    saved = torch.zeros_like(flat.flat)
    flat.save_buffers(saved)
    start = flat.layout.buffers_start
    assert torch.equal(ends, saved[start:])
    mean, cache = (s for s in flat.layout.segments if s.kind != "parameter")
    assert torch.equal(saved[mean.start : mean.stop], torch.ones(2))
    assert torch.equal(saved[cache.start : cache.stop], begun[cache.start : cache.stop])
    flat.refresh()
    assert flat.module.cache is form
    assert torch.equal(flat.module.mean, torch.zeros(2))


def test_another_buffer_that_takes_another_form_is_told() -> None:
    flat = FlatModule(nn.Sequential(Cache(persistent=True)))
    flat.module(torch.ones(5, 2))
    assert message_of(ModelError, flat.save_buffers, flat.flat) == (
        'forward makes the buffer "0.cache" [5] float32, but __init__ made it [2] float32: replicas '
        "exchange buffers, so their shape and type must not change. Give it its "
        "final form in __init__ (for the longest input, say). If it is only a cache, register it "
        "with persistent=False."
    )


@pytest.mark.parametrize("count", [1, 3])
def test_an_expanded_buffer_can_be_written_to(count: int) -> None:
    module = Cache()
    module.register_buffer("mean", torch.zeros(1).expand(count, 2))
    flat = FlatModule(module)
    for value in (3.0, 4.0):
        flat.flat.fill_(value)
        flat.refresh()
        assert torch.equal(module.mean, torch.full((count, 2), value))
        module.mean = module.mean[:1].expand(count, 2)  # as forward may make it again


@pytest.mark.parametrize(
    ("vector", "buffer", "start"),
    [
        (torch.float32, torch.bfloat16, 255.0),
        (torch.float64, torch.float32, 2.0**24 - 1),
        (torch.float32, torch.float32, float("inf")),
    ],
    ids=["bf16 in fp32", "fp32 in fp64", "infinite"],
)
def test_a_sum_that_nobody_adds_to_stays(
    vector: torch.dtype, buffer: torch.dtype, start: float
) -> None:
    """The vector may hold more digits of it than the module."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(1, dtype=vector))
    module.register_buffer("count", torch.tensor([start], dtype=buffer))
    flat = FlatModule(module, rules={"count": "sum"})
    place = flat.layout.buffers_start
    for added in (1.0, 0.0, 0.0):
        flat.refresh()
        flat.module.count += added
        changes = flat.buffers()
        if not added:
            assert not changes[:1].any()
        flat.flat[place : place + 1] += changes[:1] * 3
