"""The operations of a client on the keys of a parameter server."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from sparkdl.collectives import key_range, server_arguments
from sparkdl.collectives.key_range import KeySpec, MakeOptimizer
from sparkdl.collectives.operation_order import Kind
from sparkdl.collectives.server_client import Client
from sparkdl.collectives.server_messages import Message
from sparkdl.errors import ParameterError, kind_of, nearest, raise_all, shown


class KeyOperations:
    """The operations on keys, see :class:`sparkdl.collectives.ParameterServer`.

    Args:
        client: The conversation with the owners.
        keys: The keys by number, which are added before owners receive them.
        optimizer: Makes the optimizer of a range, or None.
        means: Whether a step takes a mean.

    Attributes:
        rank: The rank of this client.
    """

    def __init__(
        self,
        client: Client,
        keys: dict[int, KeySpec],
        optimizer: MakeOptimizer | None,
        means: bool,
    ) -> None:
        self.rank, self._client, self._keys = client.rank, client, keys
        self._optimizer, self._means = optimizer, means
        self._names: dict[Hashable, KeySpec] = {}

    def init(self, key: Any, value: Any) -> None:
        """Give a key its first value, that of rank 0.

        Args:
            key: A name: a str, an int or another hashable object that is no list. Or a list of them.
            value: A tensor, or a list of as many. All ranks give the same shapes and dtypes.

        Raises:
            sparkdl.ParameterError: The key exists, or the ranks differ.
        """
        names, values = server_arguments.as_lists(key, value)
        problems = server_arguments.new_keys(
            names, values, self._names, self._optimizer, self._means
        )
        raise_all(ParameterError, problems)
        with self._client.in_use():
            first = len(self._names)
            specs = [
                KeySpec.of(name, first + i, its, len(self._client.places))
                for i, (name, its) in enumerate(zip(names, values, strict=True))
            ]
            self._keys.update((spec.number, spec) for spec in specs)  # before owners receive them
            told = "; ".join(f"{s.name!r} {s.dtype} {list(s.shape)}" for s in specs)
            self._client.meet(f"init {told}")
            if self.rank == 0:
                for spec, whole in zip(specs, values, strict=True):
                    for place in spec.places:
                        part = key_range.as_rows(whole.detach())[spec.range_of(place)].cpu()
                        self._client.send(place, Message.INIT, [spec.number], [part])
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
        names, gradients = server_arguments.as_lists(key, gradient)
        specs = [self._spec(name) for name in names]
        raise_all(ParameterError, server_arguments.gradients(specs, gradients))
        with self._client.in_use():
            parts = {}
            for place in key_range.places_of(specs):
                words, rows = key_range.parts_at(place, specs, gradients)
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
        names, outs = server_arguments.as_lists(key, out)
        specs = [self._spec(name) for name in names]
        if out is not None:
            raise_all(ParameterError, server_arguments.gradients(specs, outs))
        with self._client.in_use():
            values = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
            parts = {p: key_range.parts_at(p, specs, values) for p in key_range.places_of(specs)}
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
        problems = server_arguments.rows(spec, rows) + server_arguments.row_values(
            spec, rows, values
        )
        raise_all(ParameterError, problems or server_arguments.sparse(self._optimizer, spec))
        with self._client.in_use():
            where, parts = spec.places_of(rows), {}
            for place in spec.places:
                chosen = where == place
                its = rows[chosen] - spec.range_of(place).start
                parts[place] = [spec.number, len(its)], [its, values[chosen]]
            self._client.operate(Kind.PUSH, [spec.number], parts)

    def pull_rows(self, key: Hashable, rows: Any) -> torch.Tensor:
        """Return some rows of a key, (n, ...), in the order of ``rows``. See :meth:`pull`."""
        spec = self._spec(key)
        rows = torch.as_tensor(rows).cpu()
        raise_all(ParameterError, server_arguments.rows(spec, rows))
        found = torch.empty(len(rows), *spec.row_shape, dtype=spec.dtype)
        with self._client.in_use():
            where, parts, into = spec.places_of(rows), {}, {}
            for place in where.unique().tolist():
                its = rows[where == place] - spec.range_of(place).start
                parts[place] = [spec.number, len(its)], [its]
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
