"""What a replica keeps between iterations, in slabs: the residual of its gradients, a hook's state.

[Note: versions of residuals] Version v+1 is made from version v by the replica itself, before it is
known whether the iteration will be committed; until then v must stay. So versions lie in two roles of
buffers by turns: while v is the committed one, everything in the role of v+1 is of an older version, or
of an attempt that came to nothing, and is free once its tick has passed, see [Note: who may write a
buffer]. A replica without rows in an iteration keeps its version, however long that lasts.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator

from sparkdl.codec.packed import (
    ByParameter,
    aligned,
    copy_packed,
    open_packed,
    packed_nbytes,
    specs_of,
)
from sparkdl.replica.iteration import ResidualHandle
from sparkdl.slab.parts import fill
from sparkdl.slab.pool import Pool

_LENGTH = struct.Struct("<q")


def write_residuals(
    pool: Pool, replica: int, before: ResidualHandle | None, kept: ByParameter, tick: int
) -> ResidualHandle:
    """Write the version after ``before``: the length of the pickled specs, they, the tensors."""
    version = before.version + 1 if before else 1
    specs = specs_of(kept)
    head = pickle.dumps(specs, protocol=pickle.HIGHEST_PROTOCOL)
    start = aligned(_LENGTH.size + len(head))
    nbytes = start + packed_nbytes(specs)
    role = f"residual.{replica}.{version % 2}"
    with pool.claim(role, _one_of_few(nbytes), tick, floor=tick) as claim:
        _LENGTH.pack_into(claim.bytes.data, 0, len(head))
        claim.bytes[_LENGTH.size : _LENGTH.size + len(head)] = memoryview(head)
        copy_packed(open_packed(specs, claim.bytes[start:nbytes]), kept)
        return ResidualHandle(claim.reference.part(0, nbytes), version)


def copy_residuals(
    pool: Pool, replica: int, nbytes: int, frames: Iterator[bytes], tick: int
) -> ResidualHandle:
    """Write what was kept in ``nbytes`` elsewhere, which ``frames`` bring (see
    :func:`sparkdl.slab.parts.frames_of`), as the first version."""
    with pool.claim(f"residual.{replica}.1", _one_of_few(nbytes), tick, floor=tick) as claim:
        fill(claim.bytes[:nbytes], frames)
        return ResidualHandle(claim.reference.part(0, nbytes), 1)


def read_residuals(pool: Pool, handle: ResidualHandle) -> ByParameter:
    """As they lie in the slab: not to be written to, and the reference to be checked after."""
    data = pool.read(handle.reference)
    (length,) = _LENGTH.unpack_from(data.data, 0)
    specs = pickle.loads(data[_LENGTH.size : _LENGTH.size + length].data)
    return open_packed(specs, data[aligned(_LENGTH.size + length) :])


def _one_of_few(nbytes: int) -> int:
    """The next of eight sizes between two powers of two, so that buffers fit again."""
    step = max(4096, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
