"""The transfer of version t to the replicas: from slabs of their node, or as bytes in frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sparkdl.codec.frames import as_tensor, decode, encode
from sparkdl.engines.shuffle.store import read_version
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.iteration import SliceHandle
from sparkdl.slab.pool import Pool
from sparkdl.slices.spec import SliceSpec
from sparkdl.slices.state import SliceState, join_states, pack, unpack

RemoteWeights = Mapping[int, SliceState | None]
"""The states of slices that came as bytes, by number; None if the slice's state was not found.

A slice without an entry lies on this node.
"""


@dataclass(frozen=True)
class _Content:
    """The content of a frame: the weights, arrays of ``lengths`` elements, and packed ``others``."""

    weights: int
    lengths: tuple[tuple[str, str, int], ...]
    others: bytes


def version_frame(
    pool: Pool, partition: int, handle: SliceHandle, dtype: torch.dtype, everything: bool
) -> bytes:
    """Return a frame with a slice's weights as raw bytes."""
    state = read_version(pool, handle, dtype)
    parts = [state.weights.view(torch.uint8)]
    content = _Content(len(state.weights), (), b"")
    if everything:
        lengths = []
        for name, array in state.arrays.items():
            parts.append(array.view(torch.uint8))
            lengths.append((name, str(array.dtype).removeprefix("torch."), len(array)))
        content = _Content(len(state.weights), tuple(lengths), pack(state))
    frame = encode((partition, True, content), *parts)
    for reference in handle.references():
        pool.check(reference)
    return frame


def read_frame(frame: bytes, dtype: torch.dtype) -> tuple[int, SliceState | None] | None:
    """Return the slice and its state in a frame.

    The state is None if the owner did not find it. The result is None if the frame says that the
    state lies on this node.
    """
    (partition, here, content), payload = decode(frame)
    if not here:
        return partition, None
    if content is None:
        return None
    place = content.weights * dtype.itemsize
    weights, arrays = as_tensor(payload[:place], dtype), {}
    for name, kind, length in content.lengths:
        array = getattr(torch, kind)
        arrays[name] = as_tensor(payload[place : place + length * array.itemsize], array)
        place += length * array.itemsize
    rest = unpack(content.others) if content.others else ()
    return partition, SliceState(weights, arrays, *rest)


def load_weights(
    live: LiveReplica,
    plans: Sequence[SliceSpec],
    states: Sequence[SliceHandle],
    arrived: RemoteWeights,
    pool: Pool,
) -> None:
    """Copy version t into the live replica, unless the replica has it already.

    Slices that did not arrive as bytes are read from slabs.
    """
    version = "/".join(state.version for state in states)
    live.flat.give_back()
    if live.version != version:
        live.note_version("")
        flat = live.flat.flat
        for plan, handle in zip(plans, states, strict=True):
            state = arrived.get(plan.index)
            source = state.weights if state else as_tensor(pool.read(handle.weights), flat.dtype)
            flat[plan.start : plan.stop].copy_(source)
            if state is None:
                pool.check(handle.weights)
        live.note_version(version)
    live.flat.refresh()


def map_weights(
    live: LiveReplica, plans: Sequence[SliceSpec], states: Sequence[SliceHandle], pool: Pool
) -> None:
    """Let the live replica compute directly with version t in slabs of this node.

    The results are valid only if ``pool.check`` passes for every slice afterwards. Only tensors
    that two slices share, buffers, and tensors of another dtype are copied.
    """
    live.note_version("")
    flat, layout = live.flat.flat, live.flat.layout
    for plan, handle in zip(plans, states, strict=True):
        values = as_tensor(pool.map_private(handle.weights), layout.dtype)
        for fragment in plan.fragments:
            segment, own = layout.segments[fragment.number], values[fragment.start : fragment.stop]
            whole = fragment.kind == "parameter" and fragment.length == segment.length
            if not (whole and live.flat.borrow(fragment.number, own)):
                start = plan.start + fragment.start
                flat[start : start + fragment.length].copy_(own)
    live.flat.refresh()


def joined_state(
    plans: Sequence[SliceSpec],
    states: Sequence[SliceHandle],
    arrived: RemoteWeights,
    pool: Pool,
    dtype: torch.dtype,
    device: torch.device,
) -> SliceState:
    """Join the states of all slices into one, see :func:`sparkdl.slices.state.join_states`."""
    found = [
        arrived.get(plan.index) or read_version(pool, handle, dtype)
        for plan, handle in zip(plans, states, strict=True)
    ]
    joined = join_states(plans, found, device)
    for plan, handle in zip(plans, states, strict=True):
        if arrived.get(plan.index) is None:
            for reference in handle.references():
                pool.check(reference)
    return joined
