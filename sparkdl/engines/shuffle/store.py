"""Versions of slices' states and of replicas' residuals in slabs.

Residuals are what a replica keeps between iterations: the rest of its compressed gradients, and the
state of a compression hook.

[Note: versions of residuals] The replica itself makes version v+1 from version v before it is known
whether the iteration will be committed; until then v must stay. So versions alternate between two
roles of buffers. While v is the committed version, everything in the role of v+1 belongs to an
older version or to a failed attempt, and is free once that is over, see [Note: who may write
a buffer]. A replica without rows in an iteration keeps its version, for any number of iterations.

The transfer of version t to the replicas: from slabs of their node, or as bytes in frames.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from sparkdl.codec.packed import (
    ByParameter,
    as_tensor,
    copy_packed,
    decode,
    encode,
    head_from_bytes,
    head_to_bytes,
    open_packed,
    packed_nbytes,
    specs_of,
)
from sparkdl.loop.engine import ARRAYS, CURRENT
from sparkdl.model.recipe import LiveReplica
from sparkdl.replica.iteration import ResidualHandle, SliceHandle
from sparkdl.slab.pool import Claim, Pool, Reference, fill
from sparkdl.slices.spec import SliceSpec, SliceState, join_states, pack, unpack

_ROUND = 4096


@contextlib.contextmanager
def next_version(
    pool: Pool, handle: SliceHandle, dtype: torch.dtype, submission: int, oldest_needed: int
) -> Iterator[tuple[SliceState, SliceState, NewVersion]]:
    """Yield version t, buffers for version t+1, and a :class:`NewVersion` to ``seal`` them with.

    Version t must not be written to. The buffers have the same number and lengths, and undefined
    content, which the ``with`` block overwrites. State that is not in arrays is the same object in
    both and has its own memory. ``seal`` checks that version t was not overwritten in the meantime,
    see [Note: who may write a buffer].
    """
    with contextlib.ExitStack() as claims:
        to = NewVersion(pool, submission, oldest_needed, claims, replaces=handle)
        old = read_version(pool, handle, dtype)
        new = SliceState(to.like("weights", old.weights), {}, old.held, old.others)
        for name, array in old.arrays.items():
            new.arrays[name] = to.like(name, array)
        yield old, new, to


class NewVersion:
    """Version t+1 of a slice while it is being written.

    Buffers of submissions below ``oldest_needed`` are free.
    """

    def __init__(
        self,
        pool: Pool,
        submission: int,
        oldest_needed: int,
        claims: contextlib.ExitStack,
        role: str = "state",
        replaces: SliceHandle | None = None,
    ) -> None:
        self._pool, self._claims = pool, claims
        self._submission, self._oldest_needed = submission, oldest_needed
        self._role, self._replaces = role, replaces
        self._claimed: dict[str, tuple[Claim, torch.Tensor]] = {}

    def like(self, name: str, other: torch.Tensor) -> torch.Tensor:
        """Return a slab-backed tensor of the length and dtype of ``other``, with undefined content."""
        claim = self._claim(other.numel() * other.element_size())
        tensor = as_tensor(claim.bytes, other.dtype)
        self._claimed[name] = claim, tensor
        return tensor

    def seal(self, state: SliceState) -> SliceHandle:
        """Write what is not in slabs yet (new optimizer state, others); return the handle."""
        for name, array in state.arrays.items():
            if name not in self._claimed:
                self.like(name, array).copy_(array)
        others = None
        if state.others:
            data = np.frombuffer(pack(state), dtype=np.uint8)
            claim = self._claim(_whole_pages(len(data)))
            claim.bytes[: len(data)] = data
            others = claim.reference.part(0, len(data))
        for reference in self._replaces.references() if self._replaces else ():
            self._pool.check(reference)
        return SliceHandle(
            self._claimed["weights"][0].reference,
            tuple(
                (name, str(self._claimed[name][1].numpy().dtype), self._claimed[name][0].reference)
                for name in state.arrays
            ),
            others,
        )

    def _claim(self, nbytes: int) -> Claim:
        return self._claims.enter_context(
            self._pool.claim(self._role, nbytes, self._submission, self._oldest_needed)
        )


def first_version(
    pool: Pool, state: SliceState, submission: int, role: str = "state"
) -> SliceHandle:
    """Write a state that is not in slabs yet."""
    with contextlib.ExitStack() as claims:
        new = NewVersion(pool, submission, submission, claims, role)
        new.like("weights", state.weights).copy_(state.weights)
        return new.seal(state)


def read_version(pool: Pool, handle: SliceHandle, dtype: torch.dtype) -> SliceState:
    """Return a state mapped from slabs: do not write to it, and check its references after use."""
    arrays = {
        name: torch.from_numpy(pool.read(reference).view(kind))
        for name, kind, reference in handle.arrays
    }
    weights = as_tensor(pool.read(handle.weights), dtype)
    rest = () if handle.others is None else unpack(pool.read(handle.others).data)
    return SliceState(weights, arrays, *rest)


def weights_at(handle: SliceHandle, which: str = CURRENT) -> list[Reference]:
    """Return references to what :func:`sparkdl.loop.engine.weights_of` returns."""
    array = next((ref for name, _, ref in handle.arrays if name == ARRAYS.get(which)), None)
    if array is None:
        return [handle.weights]
    return [array, handle.weights.part(array.nbytes, handle.weights.nbytes - array.nbytes)]


def copy_weights(pool: Pool, handle: SliceHandle, role: str, submission: int) -> SliceHandle:
    """Copy the weights of a slice that count into a buffer that only a later such copy reuses."""
    references = weights_at(handle)
    with pool.claim(role, handle.weights.nbytes, submission, submission) as claim:
        rest = claim.bytes
        for reference in references:
            rest[: reference.nbytes] = pool.read(reference)
            rest = rest[reference.nbytes :]
        for reference in references:
            pool.check(reference)
        return SliceHandle(claim.reference)


def write_copy(
    pool: Pool, handle: SliceHandle, frames: Iterator[bytes], role: str, submission: int
) -> SliceHandle:
    """Write the content of ``handle`` into buffers of ``role``; return the handle of the copy.

    Buffers of earlier submissions are free.
    """
    with contextlib.ExitStack() as claims:

        def written(reference: Reference, room: int) -> Reference:
            claim = claims.enter_context(pool.claim(role, room, submission, submission))
            fill(claim.bytes[: reference.nbytes], frames)
            return claim.reference.part(0, reference.nbytes)

        weights, *arrays = [
            written(reference, reference.nbytes)
            for reference in (handle.weights, *(reference for _, _, reference in handle.arrays))
        ]
        others = handle.others and written(handle.others, _whole_pages(handle.others.nbytes))
        return SliceHandle(
            weights,
            tuple(
                (name, kind, reference)
                for (name, kind, _), reference in zip(handle.arrays, arrays, strict=True)
            ),
            others,
        )


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _ROUND) * _ROUND


def write_residuals(
    pool: Pool, replica: int, before: ResidualHandle | None, kept: ByParameter, submission: int
) -> ResidualHandle:
    """Write the version after ``before``: a header with the specs, and the tensors."""
    version = before.version + 1 if before else 1
    specs = specs_of(kept)
    head = head_to_bytes(specs)
    nbytes = len(head) + packed_nbytes(specs)
    role = f"residual.{replica}.{version % 2}"
    with pool.claim(role, _one_of_few(nbytes), submission, oldest_needed=submission) as claim:
        claim.bytes[: len(head)] = memoryview(head)
        copy_packed(open_packed(specs, claim.bytes[len(head) : nbytes]), kept)
        return ResidualHandle(claim.reference.part(0, nbytes), version)


def copy_residuals(
    pool: Pool, replica: int, nbytes: int, frames: Iterator[bytes], submission: int
) -> ResidualHandle:
    """Write a replica's residuals from elsewhere as its first version."""
    with pool.claim(
        f"residual.{replica}.1", _one_of_few(nbytes), submission, oldest_needed=submission
    ) as claim:
        fill(claim.bytes[:nbytes], frames)
        return ResidualHandle(claim.reference.part(0, nbytes), 1)


def read_residuals(pool: Pool, handle: ResidualHandle) -> ByParameter:
    """Return residuals mapped from a slab: do not write to them, and check the reference after use."""
    data = pool.read(handle.reference)
    specs, _, start = head_from_bytes(data)
    return open_packed(specs, data[start:])


def _one_of_few(nbytes: int) -> int:
    """Round up to one of eight sizes between two powers of two, so that buffers can be reused."""
    step = max(4096, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


RemoteWeights = Mapping[int, SliceState | None]
"""The states of slices that came as bytes, by number; None if the slice's state was not found.

A slice without an entry lies on this node.
"""


def version_frame(
    pool: Pool, partition: int, handle: SliceHandle, dtype: torch.dtype, everything: bool
) -> bytes:
    """Return a frame with a slice's weights as raw bytes; with ``everything``, all of its state."""
    state = read_version(pool, handle, dtype)
    arrays = state.arrays if everything else {}
    lengths = [(name, a.dtype, len(a)) for name, a in arrays.items()]
    content = len(state.weights), lengths, pack(state) if everything else b""
    parts = [array.view(torch.uint8) for array in (state.weights, *arrays.values())]
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
    size, lengths, others = content
    place = size * dtype.itemsize
    weights, arrays = as_tensor(payload[:place], dtype), {}
    for name, kind, length in lengths:
        arrays[name] = as_tensor(payload[place : place + length * kind.itemsize], kind)
        place += length * kind.itemsize
    rest = unpack(others) if others else ()
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
    """Join the states of all slices into one, see :func:`sparkdl.slices.spec.join_states`."""
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
