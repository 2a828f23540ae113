"""A small interface to ``torch.distributed``, for teaching and prototypes.

Each collective is run by the library, or by an algorithm that is written out in this package to be read
and measured (:mod:`sparkdl.collectives.algorithms`). If speed matters, call ``torch.distributed``.

Each check of arguments returns the problems that it finds.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from sparkdl.collectives.algorithms import (
    ALGORITHMS,
    TAG,
    Combine,
    GroupLink,
    Sent,
    SubgroupLink,
    even_bounds,
)
from sparkdl.errors import ParameterError, nearest, raise_all, shown

LIBRARY = "library"
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
)
"""The dtypes that the collectives of Gloo support."""
OPS: Mapping[str, tuple[Callable[..., torch.Tensor], dist.ReduceOp.RedOpType]] = {
    "sum": (torch.add, dist.ReduceOp.SUM),
    "mean": (torch.add, dist.ReduceOp.SUM),
    "max": (torch.maximum, dist.ReduceOp.MAX),
    "min": (torch.minimum, dist.ReduceOp.MIN),
}
"""The function that combines two tensors, and the library's op. A mean is a sum, divided at the end."""


def algorithm_problems(operation: str, name: str) -> list[str]:
    """Return the problem of an algorithm that does not exist, or not for this operation."""
    written = ALGORITHMS["all_reduce" if operation == "barrier" else operation]
    known = [LIBRARY, *written]
    if name in known:
        return []
    return [
        f"{operation} has no algorithm {shown(name)}, only {', '.join(known)}.{nearest(name, known)}"
    ]


def reduction_problems(op: str, dtype: torch.dtype) -> list[str]:
    """Return the problem of an op that does not exist, or not for this dtype."""
    if op not in OPS:
        return [f"There is no op {shown(op)}, only {', '.join(OPS)}.{nearest(op, OPS)}"]
    if op == "mean" and not dtype.is_floating_point:
        return [
            f"A mean needs floating-point numbers, not {dtype_name(dtype)}: convert the tensor."
        ]
    if op == "sum" and dtype == torch.bool:
        return ['Sums of bool are not defined: take op="max" for "any" or "min" for "all".']
    return []


def tensor_problems(tensor: torch.Tensor, by_rows: bool) -> list[str]:
    """Return the problems of a dtype that Gloo does not support, or of missing rows.

    ``by_rows`` tells whether the collective splits or joins rows.
    """
    problems = []
    if tensor.dtype not in DTYPES:
        known = ", ".join(map(dtype_name, DTYPES))
        problems.append(f"Collectives carry {known}, but not {dtype_name(tensor.dtype)}.")
    if by_rows and tensor.dim() == 0:
        problems.append("A tensor without dimensions has no rows: give it one, with reshape(1).")
    return problems


def device_problems(tensor: torch.Tensor, expected: torch.device) -> list[str]:
    """Return the problem of a tensor that is not dense, or not on the backend's device."""
    if tensor.layout != torch.strided:
        return [f"The tensor is {tensor.layout}: make it dense first."]
    if tensor.device.type != expected.type:
        return [f"This group carries {expected.type} tensors: move it from {tensor.device}."]
    return []


def priority_problems(value: object) -> list[str]:
    """Return the problem of a priority that cannot be compared with others."""
    if isinstance(value, (int, float)) and value == value:
        return []
    return [f"priority={shown(value)}: give a number."]


def rank_problems(value: int, size: int) -> list[str]:
    """Return the problem of a number that is no rank of the group."""
    if 0 <= operator.index(value) < size:
        return []
    return [f"There is no rank {value}: this group has ranks 0 to {size - 1}."]


def peer_problems(value: int, size: int, own: int, tag: int) -> list[str]:
    """Return the problems of a number that is no other rank, or of a tag out of range."""
    problems = rank_problems(value, size)
    if value == own:
        problems.append(f"Rank {own} is this one: push and pull join two ranks.")
    if not 0 <= tag < TAG:
        problems.append(f"A tag is a number from 0 to {TAG - 1}, not {tag}.")
    return problems


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


NOTE_LENGTH = 512
"""The bytes of every note. The size is fixed so that a note arrives whatever the ranks disagree on."""


def as_note(text: str, device: torch.device) -> torch.Tensor:
    """Return a note as bytes."""
    data = text.encode()
    if len(data) > NOTE_LENGTH:
        raise ParameterError(f"This has too many dimensions to be described: {text[:80]} ...")
    return torch.frombuffer(bytearray(data.ljust(NOTE_LENGTH)), dtype=torch.uint8).to(device)


def read_note(note: torch.Tensor) -> str:
    """Return the text of a note."""
    return bytes(note.tolist()).decode().rstrip()


def compare_calls(
    group: dist.ProcessGroup, call: str, rows: int, device: torch.device
) -> list[int]:
    """Return the ``rows`` of each rank, or raise the same error on all of them if calls differ."""
    mine = as_note(f"{rows} {call}", device)
    notes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(notes, mine, group=group)
    found = [read_note(note).partition(" ") for note in notes]
    calls: dict[str, list[int]] = {}
    for rank, (_, _, its) in enumerate(found):
        calls.setdefault(its, []).append(rank)
    if len(calls) > 1:
        lines = (f"  {_named(ranks)}: {its}" for its, ranks in calls.items())
        raise ParameterError("\n".join(["The ranks do not call the same collective:", *lines]))
    return [int(its) for its, _, _ in found]


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Communicator:
    """The ranks of an initialized process group, as seen from one of them.

    Every rank creates one and calls the same collectives in the same order. Tensors must be on the
    device that the group's backend supports (Gloo: CPU, NCCL: CUDA). They may have any shape, may
    be empty or not contiguous, and have one of the dtypes in
    :data:`sparkdl.collectives.communicator.DTYPES`. They are never changed: results are new tensors,
    without gradients.

    ``algorithm`` is ``"library"`` or one of the algorithms that exist for the operation:

    =======================================  ===========================================
    broadcast, reduce, all_reduce, barrier   linear, tree, ring, halving-doubling
    reduce_scatter, all_gather               ring, halving-doubling
    =======================================  ===========================================

    ``op`` is "sum", "mean" (of floating-point numbers), "max" or "min". Sums are computed in the
    tensor's dtype. The written-out algorithms give the same bits on all ranks and in every run with
    the same ranks; different algorithms may round differently. Their max and min propagate NaN;
    with the library this depends on the backend.

    Before a collective the ranks compare notes, in one small all-gather of the library. If they
    differ in the call, its arguments, dtype or shape, *all* ranks raise the same ParameterError and
    the group remains usable. This does not detect a rank that calls nothing at all. The others then
    wait until the group's timeout and get the backend's RuntimeError, after which the group is
    broken.

    Args:
        group: A process group of ``torch.distributed``. The default is all ranks.

    Raises:
        ParameterError: A ValueError: an argument is invalid, or the ranks disagree. Nothing was
            sent but the arguments.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ParameterError(
                "There is no process group yet: call torch.distributed.init_process_group first."
            )
        chosen = dist.group.WORLD if group is None else group
        assert chosen is not None
        if dist.get_rank(chosen) < 0:
            raise ParameterError("This process is not in that group.")
        self._group = chosen
        self._link = GroupLink(chosen)
        self._device = torch.device("cuda" if "nccl" in dist.get_backend(chosen) else "cpu")

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group."""
        return self._group

    @property
    def rank(self) -> int:
        """Return the rank of this process in the group, from 0."""
        return self._link.rank

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self._link.size

    @property
    def sent(self) -> Sent:
        """Return the messages and bytes that this rank has sent so far for written-out algorithms.

        The library does not report what it sends.
        """
        return self._link.sent

    def push(self, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        """Send a tensor to another rank, which must pull it.

        A note with the dtype and shape is sent before it. With Gloo this returns when all was
        pulled, so if two ranks push to each other, one of them must pull first.

        Args:
            tensor: A tensor of any dtype.
            to: The rank that pulls it.
            tag: A number from 0, which the other rank must pass to :meth:`pull`. Messages with
                other tags wait. NCCL ignores tags.
        """
        problems = peer_problems(to, self.size, self.rank, tag)
        raise_all(ParameterError, problems + device_problems(tensor, self._device))
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        text = " ".join([dtype_name(tensor.dtype), *map(str, tensor.shape)])
        note = as_note(text, self._device)
        dist.send(note, group=self._group, group_dst=to, tag=tag)
        if flat.numel():
            dist.send(flat, group=self._group, group_dst=to, tag=tag)

    def pull(self, source: int, tag: int = 0) -> torch.Tensor:
        """Wait for the tensor that the rank ``source`` pushes to this one."""
        raise_all(ParameterError, peer_problems(source, self.size, self.rank, tag))
        note = torch.empty(NOTE_LENGTH, dtype=torch.uint8, device=self._device)
        dist.recv(note, group=self._group, group_src=source, tag=tag)
        name, *shape = read_note(note).split()
        dtype = getattr(torch, name)
        found = torch.empty([int(length) for length in shape], dtype=dtype, device=self._device)
        if found.numel():
            dist.recv(found.view(-1), group=self._group, group_src=source, tag=tag)
        return found

    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, algorithm: str = LIBRARY
    ) -> torch.Tensor:
        """Return the root's tensor on all ranks.

        Args:
            tensor: The tensor. The other ranks pass one of the same shape and dtype.
            root: The rank whose tensor is returned.
            algorithm: See the class.
        """
        return self._whole("broadcast", algorithm, tensor, root=root, group_src=root)

    def reduce(
        self, tensor: torch.Tensor, op: str = "sum", root: int = 0, algorithm: str = LIBRARY
    ) -> torch.Tensor | None:
        """Return the sum (mean, max, min) of the ranks' tensors on the root, and None on the others.

        Args:
            tensor: This rank's tensor.
            op: See the class.
            root: The rank that gets the result.
            algorithm: See the class.
        """
        total = self._whole("reduce", algorithm, tensor, op, root, group_dst=root)
        return total if self.rank == root else None

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", algorithm: str = LIBRARY
    ) -> torch.Tensor:
        """Return the sum (mean, max, min) of the ranks' tensors on all ranks.

        Args:
            tensor: This rank's tensor.
            op: See the class.
            algorithm: See the class.
        """
        return self._whole("all_reduce", algorithm, tensor, op)

    def reduce_scatter(
        self, tensor: torch.Tensor, op: str = "sum", algorithm: str = LIBRARY
    ) -> torch.Tensor:
        """Return this rank's rows of the sum (mean, max, min): those of ``tensor_split(size)[rank]``.

        Rows are along the first dimension. If they do not divide evenly, the first ranks get one
        more each.

        Args:
            tensor: This rank's tensor.
            op: See the class.
            algorithm: See the class.
        """
        self._agree("reduce_scatter", algorithm, tensor, op=op)
        shape = tensor.shape[1:]
        bounds = [shape.numel() * row for row in even_bounds(len(tensor), self.size)]
        flat = _flat_copy(tensor)
        blocks = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
        if algorithm == LIBRARY:
            mine = torch.empty_like(blocks[self.rank])
            dist.reduce_scatter(mine, blocks, op=OPS[op][1], group=self._group)
        else:
            ALGORITHMS["reduce_scatter"][algorithm](self._link, flat, bounds, _combine(op))
            mine = blocks[self.rank].clone()  # a view would keep all of flat alive
        rows = len(tensor.tensor_split(self.size)[self.rank])
        return self._finished(mine, op).view(rows, *shape)

    def all_gather(self, tensor: torch.Tensor, algorithm: str = LIBRARY) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated along the first dimension, which may differ.

        The library gathers equal sizes only, so shorter tensors are padded there.
        """
        rows = self._agree("all_gather", algorithm, tensor)
        shape = tensor.shape[1:]
        lengths = [shape.numel() * its for its in rows]
        flat = tensor.detach().contiguous().view(-1)
        if algorithm == LIBRARY:
            padded = flat.new_zeros(max(lengths))
            padded[: len(flat)] = flat
            found = [torch.empty_like(padded) for _ in rows]
            dist.all_gather(found, padded, group=self._group)
            whole = torch.cat([its[:length] for its, length in zip(found, lengths, strict=True)])
        else:
            bounds = [0, *itertools.accumulate(lengths)]
            whole = flat.new_empty(bounds[-1])
            whole[bounds[self.rank] : bounds[self.rank + 1]] = flat
            ALGORITHMS["all_gather"][algorithm](self._link, whole, bounds)
        return whole.view(sum(rows), *shape)

    def barrier(self, algorithm: str = LIBRARY) -> None:
        """Return when all ranks have called this. The written-out algorithms all-reduce one byte."""
        one = torch.ones(1, dtype=torch.uint8, device=self._device)
        self._agree("barrier", algorithm, one)
        if algorithm == LIBRARY:
            dist.barrier(group=self._group)
        else:
            ALGORITHMS["all_reduce"][algorithm](self._link, one, _combine("max"))

    def _whole(
        self,
        operation: str,
        algorithm: str,
        tensor: torch.Tensor,
        op: str | None = None,
        root: int | None = None,
        **of_library: int,
    ) -> torch.Tensor:
        """Run a collective on a copy of a tensor, and return the copy."""
        self._agree(operation, algorithm, tensor, op, root)
        flat = _flat_copy(tensor)
        if algorithm == LIBRARY:
            ops = {} if op is None else {"op": OPS[op][1]}
            getattr(dist, operation)(flat, group=self._group, **ops, **of_library)
        else:
            combine = [] if op is None else [_combine(op)]
            link = SubgroupLink.rooted(self._link, root or 0)
            ALGORITHMS[operation][algorithm](link, flat, *combine)
        return self._finished(flat, op).view(tensor.shape)

    def _agree(
        self,
        operation: str,
        algorithm: str,
        tensor: torch.Tensor,
        op: str | None = None,
        root: int | None = None,
    ) -> list[int]:
        """Check the arguments, here and then among the ranks, and return each rank's row count."""
        by_rows = operation in ("reduce_scatter", "all_gather")
        problems = algorithm_problems(operation, algorithm)
        problems += tensor_problems(tensor, by_rows) + device_problems(tensor, self._device)
        problems += reduction_problems(op, tensor.dtype) if op is not None else []
        problems += rank_problems(root, self.size) if root is not None else []
        raise_all(ParameterError, problems)
        details = [algorithm] if op is None else [algorithm, op]
        details += [] if root is None else [f"root {root}"]
        shape = list(map(str, tensor.shape))
        rows = 0
        if operation == "all_gather":
            rows, shape[0] = len(tensor), "any"
        call = f"{operation} ({', '.join(details)}) of {dtype_name(tensor.dtype)}"
        return compare_calls(self._group, f"{call} [{', '.join(shape)}]", rows, self._device)

    def _finished(self, total: torch.Tensor, op: str | None) -> torch.Tensor:
        return total.div_(self.size) if op == "mean" else total


def _flat_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)


def _combine(op: str) -> Combine:
    function = OPS[op][0]
    return lambda into, received: function(into, received, out=into)
