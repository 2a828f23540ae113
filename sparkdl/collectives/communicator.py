"""A small interface to ``torch.distributed``, for teaching and prototypes.

Each collective is run by the library, or by an algorithm that is written out in this package to be read
and measured (:mod:`sparkdl.collectives.algorithms`). If speed matters, call ``torch.distributed``.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from sparkdl.collectives import arguments
from sparkdl.collectives.algorithms import ALGORITHMS
from sparkdl.collectives.arguments import LIBRARY, OPS
from sparkdl.collectives.halving import Combine, even_bounds
from sparkdl.collectives.link import GroupLink, Sent, SubgroupLink
from sparkdl.errors import ParameterError, raise_all


class Communicator:
    """The ranks of an initialized process group, as seen from one of them.

    Every rank creates one and calls the same collectives in the same order. Tensors must be on the
    device that the group's backend supports (Gloo: CPU, NCCL: CUDA). They may have any shape, may
    be empty or not contiguous, and have one of the dtypes in
    :data:`sparkdl.collectives.arguments.DTYPES`. They are never changed: results are new tensors,
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
        problems = arguments.peer(to, self.size, self.rank, tag)
        raise_all(ParameterError, problems + arguments.device(tensor, self._device))
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        text = " ".join([arguments.name_of(tensor.dtype), *map(str, tensor.shape)])
        note = arguments.write(text, self._device)
        dist.send(note, group=self._group, group_dst=to, tag=tag)
        if flat.numel():
            dist.send(flat, group=self._group, group_dst=to, tag=tag)

    def pull(self, source: int, tag: int = 0) -> torch.Tensor:
        """Wait for the tensor that the rank ``source`` pushes to this one."""
        raise_all(ParameterError, arguments.peer(source, self.size, self.rank, tag))
        note = torch.empty(arguments.LENGTH, dtype=torch.uint8, device=self._device)
        dist.recv(note, group=self._group, group_src=source, tag=tag)
        name, *shape = arguments.read(note).split()
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
        self._agree("broadcast", algorithm, tensor, root=root)
        flat = _flat_copy(tensor)
        if algorithm == LIBRARY:
            dist.broadcast(flat, group=self._group, group_src=root)
        else:
            ALGORITHMS["broadcast"][algorithm](SubgroupLink.rooted(self._link, root), flat)
        return flat.view(tensor.shape)

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
        self._agree("reduce", algorithm, tensor, op=op, root=root)
        flat = _flat_copy(tensor)
        if algorithm == LIBRARY:
            dist.reduce(flat, op=OPS[op][1], group=self._group, group_dst=root)
        else:
            ALGORITHMS["reduce"][algorithm](
                SubgroupLink.rooted(self._link, root), flat, _combine(op)
            )
        return self._finished(flat, op).view(tensor.shape) if self.rank == root else None

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", algorithm: str = LIBRARY
    ) -> torch.Tensor:
        """Return the sum (mean, max, min) of the ranks' tensors on all ranks.

        Args:
            tensor: This rank's tensor.
            op: See the class.
            algorithm: See the class.
        """
        self._agree("all_reduce", algorithm, tensor, op=op)
        flat = _flat_copy(tensor)
        if algorithm == LIBRARY:
            dist.all_reduce(flat, op=OPS[op][1], group=self._group)
        else:
            ALGORITHMS["all_reduce"][algorithm](self._link, flat, _combine(op))
        return self._finished(flat, op).view(tensor.shape)

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
        problems = arguments.algorithm(operation, algorithm)
        problems += arguments.collective_tensor(tensor, by_rows) + arguments.device(
            tensor, self._device
        )
        problems += arguments.reduction(op, tensor.dtype) if op is not None else []
        problems += arguments.rank(root, self.size) if root is not None else []
        raise_all(ParameterError, problems)
        details = [algorithm] if op is None else [algorithm, op]
        details += [] if root is None else [f"root {root}"]
        shape = list(map(str, tensor.shape))
        rows = 0
        if operation == "all_gather":
            rows, shape[0] = len(tensor), "any"
        call = f"{operation} ({', '.join(details)}) of {arguments.name_of(tensor.dtype)}"
        return arguments.compare(self._group, f"{call} [{', '.join(shape)}]", rows, self._device)

    def _finished(self, total: torch.Tensor, op: str) -> torch.Tensor:
        return total.div_(self.size) if op == "mean" else total


def _flat_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)


def _combine(op: str) -> Combine:
    function = OPS[op][0]
    return lambda into, received: function(into, received, out=into)
