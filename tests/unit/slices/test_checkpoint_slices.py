"""Slices on disk: what comes back is what went in, bit for bit, also after cutting anew."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import message_of
from test_plan import layouts

from sparkdl.errors import CheckpointError, DamagedCheckpoint
from sparkdl.model.flat import Layout, TensorRange
from sparkdl.slices.slice_file import StoredSlice, WithoutAverage, pack, reslice, to_bytes, unpack
from sparkdl.slices.spec import SliceSpec, SliceState, slice_specs
from sparkdl.slices.update import EMA

quick = settings(deadline=None, max_examples=50)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def layout_of_length(length: int) -> Layout:
    segment = TensorRange("p", "parameter", 0, length, (length,), torch.float32)
    return Layout((segment,), torch.float32, length)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([torch.tensor(3.0), torch.tensor([1, -2]), torch.zeros(0, 2).bfloat16()]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Layout, dict[str, Any]]:
    """A layout and all that a run with it holds: the flat vector, arrays that some parameters have,
    other state that some have, perhaps an average."""
    layout = draw(layouts())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def noise(length: int, dtype: torch.dtype) -> torch.Tensor:
        raw = torch.randint(0, 256, (length * dtype.itemsize,), generator=generator)
        return raw.to(torch.uint8).view(dtype)  # every pattern of bits: NaNs, -0.0, denormals

    numbers = [i for i, s in enumerate(layout.segments) if s.kind == "parameter"]
    with_state = {n for n in numbers if draw(st.booleans())}
    arrays, held = {}, dict.fromkeys(sorted(with_state), ())
    names = draw(st.lists(st.sampled_from(["exp_avg", "mask", "sum", EMA]), unique=True))
    for name in names:
        dtype = draw(st.sampled_from([layout.dtype, torch.bfloat16, torch.int64]))
        owners = {n for n in with_state if draw(st.booleans())}
        if name == EMA:  # of all parameters, and no optimizer's
            dtype, owners = layout.dtype, set(numbers)
        whole = torch.zeros(layout.size, dtype=dtype)
        for n in owners:
            s = layout.segments[n]
            whole[s.start : s.stop] = noise(s.length, dtype)
            if name != EMA:
                held[n] += (name,)
        arrays[name] = whole, owners
    keys = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
    return layout, {
        "weights": noise(layout.size, layout.dtype),
        "arrays": arrays,
        "held": held,
        "others": {n: draw(keys) for n in sorted(with_state)},
    }


def state_in(run: dict[str, Any], plan: SliceSpec) -> SliceState:
    """The state that slice ``plan`` of the run has."""
    mine = {p.number for p in plan.parameters}
    place = slice(plan.start, plan.start + plan.trainable_length)
    return SliceState(
        run["weights"][plan.start : plan.stop].clone(),
        {
            name: whole[place].clone()
            for name, (whole, own) in run["arrays"].items()
            if own & mine or name == EMA
        },
        {number: names for number, names in run["held"].items() if number in mine},
        {number: values for number, values in run["others"].items() if number in mine},
    )


def assert_value(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert bits(found) == bits(expected)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_value(one, other)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_value(found[key], expected[key])
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found)
    else:
        assert found == expected
        assert str(found) == str(expected)  # -0.0


def assert_state(found: SliceState, expected: SliceState, plan: SliceSpec) -> None:
    """Equal bits; an array that is missing is one of zeros."""
    assert bits(found.weights) == bits(expected.weights)
    assert (EMA in found.arrays) == (EMA in expected.arrays)
    assert set(expected.arrays) <= set(found.arrays)
    for name, array in found.arrays.items():
        assert array.shape == (plan.trainable_length,)
        other = expected.arrays.get(name, torch.zeros_like(array))
        assert array.dtype == other.dtype
        assert bits(array) == bits(other)
    assert found.held == expected.held
    assert_value(found.others, expected.others)


@quick
@given(
    runs(),
    st.integers(1, 7),
    st.integers(1, 7),
    st.tuples(st.booleans(), st.booleans()),
    st.randoms(use_true_random=False),
)
def test_cutting_anew_and_back_changes_no_bit(
    run: tuple[Layout, dict], one: int, other: int, whole: tuple[bool, bool], random: Any
) -> None:
    layout, content = run
    first, second = slice_specs(layout, one, whole[0]), slice_specs(layout, other, whole[1])
    stored = [unpack(to_bytes(plan, state_in(content, plan))) for plan in first]
    for plan, part in zip(first, stored, strict=True):
        assert (part.start, part.stop) == (plan.start, plan.stop)
        assert part.trainable_length == plan.trainable_length
        assert set(part.state.arrays) == set(state_in(content, plan).arrays)
        assert_state(part.state, state_in(content, plan), plan)
    random.shuffle(stored)
    states = [reslice(stored, plan, layout.dtype) for plan in second]
    for plan, state in zip(second, states, strict=True):
        assert_state(state, state_in(content, plan), plan)
    again = [unpack(to_bytes(p, s)) for p, s in zip(second, states, strict=True)]
    for plan in first:
        assert_state(reslice(iter(again), plan, layout.dtype), state_in(content, plan), plan)


def test_a_parameter_over_three_slices_takes_its_state_from_where_it_starts() -> None:
    layout = layout_of_length(96)
    first, second, third = slice_specs(layout, 3)
    assert [p.parameters[0].length for p in (first, second, third)] == [32, 32, 32]
    parts = [
        unpack(to_bytes(p, SliceState(torch.zeros(32), {}, {0: ()}, {0: {"place": i}})))
        for i, p in enumerate((first, second, third))
    ]
    (whole,) = slice_specs(layout, 1)
    found = reslice([parts[2], parts[0], parts[1]], whole, torch.float32)
    assert found.others == {0: {"place": 0}}
    del parts[0].state.others[0], parts[0].state.held[0]  # it had no state there yet
    found = reslice([parts[2], parts[0], parts[1]], whole, torch.float32)
    assert found.others == {0: {"place": 1}}


# Mistakes and damage


class Strange:
    pass


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"cache": Strange()}, ', "cache" is a Strange'),
        ({"cache": [1, {"deep": Strange()}]}, ", \"cache\"[1]['deep'] is a Strange"),
        ({"cache": {1.5: 2}}, ', "cache" has the key 1.5, a float'),
        ({"cache": {1, 2}}, ', "cache" is a set'),
        ({"cache": torch.zeros(2).to(torch.complex128)}, ', "cache" is a torch.complex128'),
        ({"cache": torch.eye(2).to_sparse()}, ', "cache" is a torch.sparse_coo tensor'),
        ({3: 1}, " has the key 3, an int"),
    ],
)
def test_state_that_cannot_be_stored_is_named(state: Any, says: str) -> None:
    (plan,) = slice_specs(layout_of_length(16), 1)
    state = SliceState(torch.zeros(16), {}, {0: ()}, {0: state})
    assert f"parameter 0{says}" in message_of(CheckpointError, pack, plan, state)


def test_tensors_that_share_memory_are_stored_apart() -> None:
    (plan,) = slice_specs(layout_of_length(16), 1)
    memory = torch.arange(32.0)
    arrays = {"a": memory[:16], "b": memory[8:24]}
    state = SliceState(memory[:16], arrays, {0: ("a", "b")}, {0: {"t": memory[3]}})
    part = unpack(to_bytes(plan, state))
    assert_state(part.state, state, plan)


def test_a_file_holds_no_pickle_and_says_what_it_is() -> None:
    (plan,) = slice_specs(layout_of_length(16), 1)
    others = {0: {"step": torch.tensor(2.0)}}
    data = to_bytes(plan, SliceState(torch.zeros(16), {}, {0: ()}, others))
    assert set(safetensors.torch.load(data)) == {"weights", "other.1"}
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"]["format"] == "sparkdl-slice"


def metadata(**changes: str) -> bytes:
    content = {"format": "sparkdl-slice", "version": "1", "start": "0", "stop": "16"}
    content |= {"trainable_length": "16", "others": "[]", "held": "[]"}
    return safetensors.torch.save({"weights": torch.zeros(16)}, {**content, **changes})


@pytest.mark.parametrize(
    "data",
    [
        *(metadata()[:end] for end in (0, 7, 8, 100, -1)),
        b"not safetensors at all",
        safetensors.torch.save({"weights": torch.zeros(16)}),
        metadata(format="other"),
        metadata(version="2"),
        metadata(start="x"),
        metadata(stop="17"),
        metadata(trainable_length="17"),
        metadata(others="{"),
        metadata(others='[[0, [["a", {"tensor": "absent"}]]]]'),
        metadata(others='[[0, [["a", {"code": "x"}]]]]'),
        metadata(others="[" * 100_000),
        metadata(held="{"),
        metadata(held="[[0, []]]"),
        metadata(others="[[0, []]]"),
        metadata(held='[[0, ["absent"]]]', others="[[0, []]]"),
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_bytes_that_are_no_slice_are_damage(data: bytes) -> None:
    unpack(metadata())  # whole as it stands
    with pytest.raises(DamagedCheckpoint):
        unpack(data)


def test_parts_must_cover_the_slice_once() -> None:
    layout = layout_of_length(64)
    plans = slice_specs(layout, 4)
    parts = [unpack(to_bytes(p, SliceState(torch.ones(16)))) for p in plans]
    (whole,) = slice_specs(layout, 1)
    for wrong in (parts[:3], parts[1:], [*parts[:1], *parts[2:]], [*parts, parts[1]], []):
        with pytest.raises(DamagedCheckpoint, match="exactly once"):
            reslice(wrong, whole, torch.float32)
    with pytest.raises(DamagedCheckpoint, match="float32"):
        reslice(parts, whole, torch.float64)
    with_average = StoredSlice(0, 16, 16, SliceState(torch.ones(16), {EMA: torch.ones(16)}))
    with pytest.raises(DamagedCheckpoint, match="ema"):
        reslice([with_average, *parts[1:]], whole, torch.float32)


def test_a_run_without_a_moving_average_takes_up_none() -> None:
    state = SliceState(torch.zeros(4), {EMA: torch.ones(4), "momentum_buffer": torch.ones(4)})
    read = WithoutAverage(lambda plan, dtype: state)
    assert list(read(SliceSpec(0, 0, 4, ()), torch.float32).arrays) == ["momentum_buffer"]
