"""A parameter server on the ranks of a process group: keys, pushes of gradients, pulls of values.

The parameter server under the names of MXNet's KVStore.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from sparkdl.collectives.key_range import (
    KeySpec,
    MakeOptimizer,
    Manifest,
    as_rows,
    folder_of,
    new_name,
    optimizer_name,
    parts_at,
    places_of,
)
from sparkdl.collectives.server_client import (
    Client,
    as_lists,
    checked_options,
    gradient_problems,
    new_key_problems,
    optimizer_problems,
    row_problems,
    row_value_problems,
    sparse_problems,
)
from sparkdl.collectives.server_messages import Kind
from sparkdl.errors import CheckpointError, ParameterError, kind_of, nearest, raise_all, shown

_open: set[ParameterServer] = set()
"""Those of this process that nobody has closed, which would otherwise end with no notice."""


class ParameterServer:
    """Tensors that the ranks of a process group share, updated where they lie.

    A *key* names a tensor. Its rows are shared out to *owners*, which are ranks. Every rank is a
    *client*: it pulls values and pushes gradients, from which an owner makes a step of the
    optimizer. Owners serve in threads of their own, beside whatever the rank does.

    =====================  ================================================================
    ``consistency``        one step of a key takes
    =====================  ================================================================
    ``"asynchronous"``     one gradient, as soon as it comes. ``staleness=s``: a client that
                           has pushed a key more than s times more often than the slowest
                           one waits; None (the default): nobody waits.
    ``"synchronous"``      a gradient of every client: their mean. ``staleness=0`` (the
                           default): a pull waits for all earlier steps; ``staleness=s``: it
                           may miss the last s (stale synchronous).
    =====================  ================================================================

    All owners apply operations in one order, so a pull never mixes two states. :attr:`order` has
    it after :meth:`close`, and ``replay=order`` repeats it: the same function on the same data
    then gives the same bits, whatever the speeds of the ranks.

    The constructor, :meth:`init`, :meth:`load`, :meth:`set_optimizer`, :meth:`barrier` and
    :meth:`close` are called on all ranks in the same order; pushes and pulls by whoever wants to. Use
    the object as a context manager, which closes it. It may be used from several threads, one at a
    time.

    Args:
        optimizer: A ``torch.optim`` class, or a ``partial`` of one, that is called with a list of
            tensors. None means that what is pushed is added to the value.
        consistency: "asynchronous" or "synchronous".
        staleness: How far clients may be apart, see above.
        owners: The ranks that have the values. None means all ranks.
        average: Whether a synchronous step takes the mean of the gradients. Otherwise it takes
            their sum.
        timeout: The seconds that any call may wait.
        replay: The order of an earlier run.

    Raises:
        sparkdl.ParameterError: There is no process group, an argument is wrong, or ranks differ.
    """

    def __init__(
        self,
        optimizer: MakeOptimizer | None = None,
        *,
        consistency: str = "asynchronous",
        staleness: int | None = None,
        owners: Iterable[int] | None = None,
        average: bool = True,
        timeout: float = 300.0,
        replay: Sequence[int] | torch.Tensor | None = None,
    ) -> None:
        ranks, options = checked_options(
            optimizer, consistency, staleness, owners, average, timeout, replay
        )
        self._keys: dict[int, KeySpec] = {}  # a key is here before owners receive it
        self._names: dict[Hashable, KeySpec] = {}
        self._client = Client(ranks, self._keys, optimizer, options)
        self._optimizer, self._means = optimizer, options.synchronous and options.average
        self.rank, self.size = self._client.rank, dist.get_world_size()
        self._order = torch.empty(0, dtype=torch.int32)
        _open.add(self)

    def init(self, key: Any, value: Any) -> None:
        """Give a key its first value, that of rank 0.

        Args:
            key: A name: a str, an int or another hashable object that is no list. Or a list of them.
            value: A tensor, or a list of as many. All ranks give the same shapes and dtypes.

        Raises:
            sparkdl.ParameterError: The key exists, or the ranks differ.
        """
        names, values = as_lists(key, value)
        problems = new_key_problems(names, values, self._names, self._optimizer, self._means)
        raise_all(ParameterError, problems)
        with self._client.in_use():
            first = len(self._names)
            specs = [
                KeySpec.of(name, first + i, its.shape, its.dtype, len(self._client.places))
                for i, (name, its) in enumerate(zip(names, values, strict=True))
            ]
            self._keys.update((spec.number, spec) for spec in specs)  # before owners receive them
            told = "; ".join(f"{s.name!r} {s.dtype} {list(s.shape)}" for s in specs)
            self._client.meet(f"init {told}")
            if self.rank == 0:
                for spec, whole in zip(specs, values, strict=True):
                    for place in spec.places:
                        part = as_rows(whole.detach())[spec.range_of(place)].cpu()
                        self._client.send(place, Kind.INIT, [spec.number], [part])
                    for place in spec.places:
                        self._client.answer(place)
            self._client.meet(f"init {told}")
            self._names.update((spec.name, spec) for spec in specs)

    def push(self, key: Any, gradient: Any) -> None:
        """Push a gradient. Return when it has its turn and was sent; the owners apply it then.

        Args:
            key: A key, or a list of keys, which are pushed as one operation.
            gradient: A tensor of the key's shape and dtype on any device, or a list of tensors.

        Raises:
            sparkdl.ParameterError: There is no such key, or a gradient does not fit.
            sparkdl.StalledError: The slowest client is too far behind for longer than ``timeout``.
            sparkdl.StateLostError: A rank is lost.
        """
        names, gradients = as_lists(key, gradient)
        specs = [self._spec(name) for name in names]
        raise_all(ParameterError, gradient_problems(specs, gradients))
        with self._client.in_use():
            parts = {}
            for place in places_of(specs):
                words, rows = parts_at(place, specs, gradients)
                parts[place] = words, [its.detach().cpu() for its in rows]
            self._client.operate(Kind.PUSH, [spec.number for spec in specs], parts)

    def pull(self, key: Any, out: Any = None) -> Any:
        """Return the value of a key, after all operations before this one.

        Args:
            key: A key, or a list of keys, which are pulled as one operation.
            out: A tensor, or a list of tensors, to copy the values into.

        Returns:
            A new CPU tensor, or a list of them; or ``out``.

        Raises what :meth:`push` raises.
        """
        names, outs = as_lists(key, out)
        specs = [self._spec(name) for name in names]
        if out is not None:
            raise_all(ParameterError, gradient_problems(specs, outs))
        with self._client.in_use():
            values = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
            parts = {p: parts_at(p, specs, values) for p in places_of(specs)}
            asked = {place: (words, ()) for place, (words, _) in parts.items()}
            self._client.operate(Kind.PULL, [spec.number for spec in specs], asked)
            self._client.answers({place: rows for place, (_, rows) in parts.items()})
        if out is None:
            return values if isinstance(key, list) else values[0]
        with torch.no_grad():
            for into, value in zip(outs, values, strict=True):
                into.copy_(value)
        return out

    def push_rows(self, key: Hashable, rows: Any, values: torch.Tensor) -> None:
        """Push the gradient of some rows; the optimizer updates these rows alone.

        Args:
            key: A key whose tensor has rows.
            rows: The numbers of the rows: int64, (n,). One that stands twice counts twice.
            values: Their gradients, (n, ...).

        Raises:
            sparkdl.ParameterError: As :meth:`push`; or the optimizer takes no sparse gradients.
        """
        spec = self._spec(key)
        if not isinstance(values, torch.Tensor):
            raise ParameterError(f"{shown(key)}: give a tensor, not {kind_of(values)}.")
        rows, values = torch.as_tensor(rows).cpu(), values.detach().cpu()
        problems = row_problems(spec, rows) + row_value_problems(spec, rows, values)
        raise_all(ParameterError, problems or sparse_problems(self._optimizer, spec))
        with self._client.in_use():
            where, parts = spec.places_of(rows), {}
            for place in spec.places:
                chosen = where == place
                its = rows[chosen] - spec.range_of(place).start
                parts[place] = [(spec.number, True)], [its, values[chosen]]
            self._client.operate(Kind.PUSH, [spec.number], parts)

    def pull_rows(self, key: Hashable, rows: Any) -> torch.Tensor:
        """Return some rows of a key, (n, ...), in the order of ``rows``. See :meth:`pull`."""
        spec = self._spec(key)
        rows = torch.as_tensor(rows).cpu()
        raise_all(ParameterError, row_problems(spec, rows))
        found = torch.empty(len(rows), *spec.row_shape, dtype=spec.dtype)
        with self._client.in_use():
            where, parts, into = spec.places_of(rows), {}, {}
            for place in where.unique().tolist():
                its = rows[where == place] - spec.range_of(place).start
                parts[place] = [(spec.number, True)], [its]
                into[place] = [torch.empty(len(its), *spec.row_shape, dtype=spec.dtype)]
            self._client.operate(Kind.PULL, [spec.number], parts)
            self._client.answers(into)
            for place, (values,) in into.items():
                found[where == place] = values
        return found

    def _spec(self, name: Hashable) -> KeySpec:
        self._client.check_open()
        if name not in self._names:
            texts = [known for known in self._names if isinstance(known, str)]
            close = nearest(name, texts) if isinstance(name, str) else ""
            raise ParameterError(f"There is no key {name!r}: init it on all ranks first.{close}")
        return self._names[name]

    @property
    def order(self) -> torch.Tensor:
        """Return the rank of each operation in their order, int32, once the server is closed."""
        if not self._client.closed:
            raise ParameterError("The order is known once the server is closed: call close().")
        return self._order

    def set_optimizer(self, optimizer: MakeOptimizer | None) -> None:
        """Update with a new optimizer from now on. What the old one knew, such as momentum, is lost.

        Args:
            optimizer: See the class. Every rank gives the same.
        """
        raise_all(ParameterError, optimizer_problems(optimizer, len(self._client.places)))
        with self._client.in_use():
            self._optimizer = optimizer
            if self._client.server is not None:
                self._client.server.next_make = optimizer
            self._client.meet("set_optimizer")
            if self.rank == 0:
                self._everywhere(Kind.OPTIMIZER)
            self._client.meet("set_optimizer")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all values, and the state of their optimizers, to a folder; called on one rank.

        It is an operation with its turn, as a push is: the folder has the steps that the pushes
        before it have made. Gradients that wait for those of other clients are not in it. The owners
        serve nobody while they write. A folder that has a checkpoint keeps that one until the new one
        is whole.

        Args:
            path: A folder that the machines of all ranks see.

        Raises:
            sparkdl.CheckpointError: A file cannot be written; the server remains usable.
        """
        folder = folder_of(path)
        with self._client.in_use():
            places, name = self._client.places, optimizer_name(self._optimizer)
            saved = Manifest(folder, new_name(), len(places), name, tuple(self._names.values()))
            parts = {place: ([str(saved.file_of(place))], ()) for place in places}
            self._client.operate(Kind.SAVE, [], parts)
            self._client.answers(dict.fromkeys(places, ()))
            saved.write()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Give the keys of a folder that :meth:`save` wrote their values; called on all ranks.

        It takes the place of :meth:`init`. The number of owners may be another one. Optimizers have
        their state, and the hyperparameters of this server's ``optimizer``.

        Args:
            path: The folder.

        Raises:
            sparkdl.CheckpointError: There is no checkpoint, or it cannot be read.
            sparkdl.ParameterError: A key exists already, or the optimizer is another one.
        """
        saved = Manifest.read(folder_of(path))
        name = optimizer_name(self._optimizer)
        problems = [
            f"The key {s.name!r} exists already." for s in saved.keys if s.name in self._names
        ]
        if saved.optimizer != name:
            problems.append(
                f'"{saved.folder}" has the state of {saved.optimizer or "no optimizer"}, and this '
                f"server has {name or 'none'}: load with that one, then call set_optimizer."
            )
        raise_all(ParameterError, problems)
        with self._client.in_use():
            first, places, failed = len(self._names), len(self._client.places), None
            specs = [
                KeySpec.of(s.name, first + s.number, s.shape, s.dtype, places) for s in saved.keys
            ]
            self._keys.update((spec.number, spec) for spec in specs)
            try:
                if self._client.server is not None:
                    self._client.server.read(saved, specs, self._optimizer)
            except CheckpointError as error:
                failed = error
            try:
                self._client.meet(f"load {saved.name}" if failed is None else str(failed))
            finally:
                if failed is not None:
                    raise failed
            if self.rank == 0:
                self._everywhere(Kind.LOAD)
            self._client.meet("load")
            self._names.update((spec.name, spec) for spec in specs)

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        with self._client.in_use():
            self._client.meet("barrier")

    def close(self) -> None:
        """Finish, wait for all ranks, and end the server. Nobody waits for this rank's pushes now.

        Raises:
            sparkdl.SparkdlError: An update has failed on an owner, or a rank is lost or too late.
        """
        if self._client.closed:
            return
        try:
            with self._client.in_use():
                self._everywhere(Kind.FINISH)
                self._order = torch.tensor(self._client.meet("close"), dtype=torch.int32)
                self._client.say_goodbye()
                self._client.end()
                _open.discard(self)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """End the server at once, without waiting for others: their calls fail."""
        if not self._client.closed:
            self._client.disconnect()
            self._client.end()
            _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _everywhere(self, kind: Kind) -> None:
        """Make an operation that concerns all owners and no key."""
        self._client.operate(kind, [], dict.fromkeys(self._client.places, ((), ())))
        self._client.answers(dict.fromkeys(self._client.places, ()))


def abandon_all() -> None:
    """Abandon every parameter server of this process that nobody has closed."""
    for server in list(_open):
        server.abandon()


KINDS = {"dist_sync": "synchronous", "dist_async": "asynchronous"}


class KVStore(ParameterServer):
    """A :class:`ParameterServer` with the names and rules of MXNet's distributed KVStore.

    Under "dist_sync" a step takes the *sum* of all workers' gradients, and under "dist_async" each
    gradient is a step. Without an optimizer, what is pushed replaces the value. For everything
    else, such as staleness or replay, use :class:`ParameterServer`.

    Args:
        type: "dist_sync" or "dist_async".
        owners: The ranks that have the values. None means all ranks.
        timeout: The seconds that any call may wait.

    Attributes:
        type: The type.
    """

    def __init__(
        self,
        type: str = "dist_sync",
        *,
        owners: Iterable[int] | None = None,
        timeout: float = 300.0,
    ) -> None:
        if not isinstance(type, str) or type not in KINDS:
            known = " or ".join(f'"{word}"' for word in KINDS)
            raise ParameterError(f"type = {shown(type)}: give {known}.{nearest(str(type), KINDS)}")
        self.type = type
        super().__init__(
            Assign, consistency=KINDS[type], owners=owners, average=False, timeout=timeout
        )

    @property
    def server(self) -> ParameterServer:
        """Return the parameter server, which is this object."""
        return self

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        return self.size

    def push(self, key: Any, value: Any) -> None:
        """Push a value, or a sparse COO tensor with the rows that it has."""
        if isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo:
            rows = value.coalesce()
            self.push_rows(key, rows.indices()[0], rows.values())
        else:
            super().push(key, value)

    def row_sparse_pull(
        self, key: Hashable, row_ids: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return some rows of a key, or copy them into the same rows of ``out``."""
        values = self.pull_rows(key, row_ids)
        if out is None:
            return values
        with torch.no_grad():
            out[torch.as_tensor(row_ids)] = values.to(out.device)
        return out


class Assign(torch.optim.Optimizer):
    """Replace the values by what is pushed: MXNet's rule where there is no optimizer."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Copy every gradient into its tensor; of a sparse one, the rows that it has."""
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None and tensor.grad.is_sparse:
                    tensor[tensor.grad.indices()[0]] = tensor.grad.values()
                elif tensor.grad is not None:
                    tensor.copy_(tensor.grad)
