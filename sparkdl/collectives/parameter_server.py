"""A parameter server on the ranks of a process group: keys, pushes of gradients, pulls of values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from sparkdl.collectives import server_arguments, server_files
from sparkdl.collectives.key_operations import KeyOperations
from sparkdl.collectives.key_range import KeySpec, MakeOptimizer, optimizer_name
from sparkdl.collectives.operation_order import Kind
from sparkdl.collectives.server_client import connect
from sparkdl.collectives.server_files import Manifest
from sparkdl.collectives.words import text_tensor
from sparkdl.errors import CheckpointError, ParameterError, raise_all

_open: set[ParameterServer] = set()
"""Those of this process that nobody has closed, which would otherwise end with no notice."""


class ParameterServer(KeyOperations):
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
        ranks, options = server_arguments.checked(
            optimizer, consistency, staleness, owners, average, timeout, replay
        )
        keys: dict[int, KeySpec] = {}
        client, self._server = connect(ranks, keys, optimizer, options)
        super().__init__(client, keys, optimizer, options.synchronous and options.average)
        self.size, self._order = dist.get_world_size(), torch.empty(0, dtype=torch.int32)
        _open.add(self)

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
        raise_all(ParameterError, server_arguments.optimizer(optimizer, len(self._client.places)))
        with self._client.in_use():
            self._optimizer = optimizer
            if self._server is not None:
                self._server.next_make = optimizer
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
        folder = server_files.folder_of(path)
        with self._client.in_use():
            places, name = self._client.places, optimizer_name(self._optimizer)
            saved = Manifest(
                folder, server_files.new_name(), len(places), name, tuple(self._names.values())
            )
            notes = {place: text_tensor(str(saved.file_of(place))) for place in places}
            parts = {place: ([len(note)], [note]) for place, note in notes.items()}
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
        saved = Manifest.read(server_files.folder_of(path))
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
                KeySpec.shared(s.name, first + s.number, s.shape, s.dtype, places)
                for s in saved.keys
            ]
            self._keys.update((spec.number, spec) for spec in specs)
            try:
                if self._server is not None:
                    self._server.read(saved, specs, self._optimizer)
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

    def __enter__(self) -> ParameterServer:
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
