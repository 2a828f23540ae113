"""Keys of a parameter server, cut into ranges of rows, and the updates of one range.

The files of a parameter server's checkpoint: one of each owner, and a manifest that names them.

An owner writes its ranges and the state of their optimizers as safetensors. The manifest is written
last, and replaces the one before, so that a folder always has a whole checkpoint. It says how the
rows were shared out; whoever reads looks up the files that have the wanted rows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import safe_open

from sparkdl.codec.files import (
    MAX_JSON_BYTES,
    checksum,
    is_changed,
    is_uri,
    mappable,
    parse_json,
    read_plain,
    with_checksum,
)
from sparkdl.codec.safe import STORABLE, decode, encode
from sparkdl.collectives.algorithms import even_bounds
from sparkdl.collectives.communicator import dtype_name
from sparkdl.errors import CheckpointError, ParameterError, kind_of, shown

MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def optimizer_name(make: MakeOptimizer | None) -> str:
    """Return the name of an optimizer's class; an empty string if there is none."""
    return "" if make is None else type(make([torch.zeros(1)])).__name__


@dataclass(frozen=True)
class KeySpec:
    """A key: a tensor whose rows, along its first dimension, are shared out to places.

    A *place* is the number of an owner among the owners. The blocks of consecutive keys begin at
    different places, so that keys of few rows do not all lie at the first one.
    """

    name: Hashable
    number: int  # in the order of ParameterServer.init
    shape: torch.Size
    dtype: torch.dtype
    bounds: tuple[int, ...]  # the ends of the blocks of rows

    @staticmethod
    def of(
        name: Hashable, number: int, shape: Sequence[int], dtype: torch.dtype, places: int
    ) -> KeySpec:
        """Describe a key whose rows are shared out to so many places."""
        bounds = even_bounds(shape[0] if shape else 1, places)
        return KeySpec(name, number, torch.Size(shape), dtype, tuple(bounds))

    @property
    def rows(self) -> int:
        """Return the number of rows; a tensor without dimensions is one row."""
        return self.bounds[-1]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[1:])

    @property
    def places(self) -> list[int]:
        """Return the places that have at least one row, or one element."""
        return [p for p in range(len(self.bounds) - 1) if self.range_shape(p)[0]]

    def range_of(self, place: int) -> slice:
        """Return the rows of a place."""
        block = (place + self.number) % (len(self.bounds) - 1)
        return slice(self.bounds[block], self.bounds[block + 1])

    def range_shape(self, place: int) -> tuple[int, ...]:
        """Return the shape of what a place has."""
        its = self.range_of(place)
        return (its.stop - its.start, *self.row_shape)

    def places_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the place of each row."""
        blocks = torch.searchsorted(torch.tensor(self.bounds), rows, right=True) - 1
        return (blocks - self.number) % (len(self.bounds) - 1)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its rows along the first dimension, also if it has no dimension."""
    return tensor if tensor.dim() else tensor.view(1)


def places_of(specs: Sequence[KeySpec]) -> list[int]:
    """Return the places that have a row of any of the keys."""
    return sorted({place for spec in specs for place in spec.places})


def parts_at(
    place: int, specs: Sequence[KeySpec], tensors: Sequence[torch.Tensor]
) -> tuple[list[tuple[int, bool]], list[torch.Tensor]]:
    """Return what an operation on whole keys says to a place, and the rows of each tensor there."""
    here = [(s, its) for s, its in zip(specs, tensors, strict=True) if place in s.places]
    return [(spec.number, False) for spec, _ in here], [
        as_rows(its)[spec.range_of(place)] for spec, its in here
    ]


class Gradient(NamedTuple):
    """A gradient that a client has pushed to a range."""

    values: torch.Tensor
    rows: torch.Tensor | None = None  # counted from the first of the range; None: all


class KeyRange:
    """The rows of a key that one owner has, and their optimizer; without one, pushes are added."""

    def __init__(self, values: torch.Tensor, make: MakeOptimizer | None, average: bool) -> None:
        self.values = values
        self._average = average
        self.use(make)

    def use(self, make: MakeOptimizer | None) -> None:
        """Update with a new optimizer from now on."""
        self._optimizer = None if make is None else make([self.values])

    @property
    def state(self) -> dict[str, Any]:
        """Return the state of the optimizer, which may be changed."""
        return {} if self._optimizer is None else self._optimizer.state[self.values]

    @torch.no_grad()
    def step(self, gradients: Sequence[Gradient]) -> None:
        """Make one step with gradients, which are summed in their order."""
        scale = 1 / len(gradients) if self._average and len(gradients) > 1 else None
        if all(gradient.rows is not None for gradient in gradients):
            rows = torch.cat([gradient.rows for gradient in gradients if gradient.rows is not None])
            values = torch.cat([gradient.values for gradient in gradients])
            self._step_rows(rows, values if scale is None else values * scale)
            return
        total = gradients[0].values if gradients[0].rows is None else self._whole(gradients[0])
        for gradient in gradients[1:]:
            total = total + (gradient.values if gradient.rows is None else self._whole(gradient))
        total = total if scale is None else total * scale
        if self._optimizer is None:
            self.values.add_(total)
        else:
            self._update(self._optimizer, total)

    def _step_rows(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        if self._optimizer is None:
            self.values.index_add_(0, rows, values)
        else:
            shape = self.values.shape
            found = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)
            self._update(self._optimizer, found.coalesce())

    def _whole(self, gradient: Gradient) -> torch.Tensor:
        assert gradient.rows is not None
        return torch.zeros_like(self.values).index_add_(0, gradient.rows, gradient.values)

    def _update(self, optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
        self.values.grad = gradient
        with torch.sparse.check_sparse_tensor_invariants(False):  # else Adagrad's step warns
            optimizer.step()
        self.values.grad = None


class Rounds:
    """The steps of a key to which every client adds one gradient.

    Round ``n`` has the ``n``-th push of each client. Its step is made once every client has pushed
    or finished, with the gradients in rank order, so that its bits do not depend on who comes first.
    """

    def __init__(self, clients: int) -> None:
        self._open: list[deque[Gradient]] = [deque() for _ in range(clients)]

    def add(self, client: int, gradient: Gradient) -> None:
        """Add a client's next gradient."""
        self._open[client].append(gradient)

    def complete(self, active: Sequence[int]) -> list[list[Gradient]]:
        """Remove the rounds that all ``active`` clients have made; return their gradients."""
        found = []
        while any(self._open) and all(self._open[client] for client in active):
            found.append([pushed.popleft() for pushed in self._open if pushed])
        return found


MANIFEST, FORMAT = "parameter_server.json", 1
_CHECKSUMS = "checksums"
"""The key of the tensors' checksums, beside the states of an owner's file."""
_DTYPES = {dtype_name(dtype): dtype for dtype in STORABLE}


def folder_of(path: Any) -> Path:
    """Return the folder of a checkpoint."""
    if not isinstance(path, (str, os.PathLike)) or not str(path) or is_uri(path):
        raise ParameterError(
            f"path = {shown(path)}: give a folder that the machines of all ranks see, such as "
            "one on NFS."
        )
    return Path(path).absolute()


def new_name() -> str:
    """Return the name of a new checkpoint, which its files have."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint."""

    folder: Path
    name: str
    owners: int
    optimizer: str  # its class; "" without one
    keys: tuple[KeySpec, ...]  # as these owners had them

    def file_of(self, place: int) -> Path:
        """Return the file of an owner."""
        return self.folder / f"owner-{place}-of-{self.owners}-{self.name}.safetensors"

    def write(self) -> None:
        """Write the manifest, once all files are there, and delete those of older checkpoints."""
        names = [self.file_of(place).name for place in range(self.owners)]
        keys = [
            {"name": encode(s.name, "key"), "shape": list(s.shape), "dtype": dtype_name(s.dtype)}
            for s in self.keys
        ]
        content = {
            **{"format": FORMAT, "name": self.name, "owners": self.owners},
            **{"optimizer": self.optimizer, "keys": keys},
        }
        with _explained("save", self.folder):
            for place, name in enumerate(names):
                if not (self.folder / name).exists():
                    raise OSError(
                        f"the file of owner {place} is not there: give a folder that the machines of "
                        "all ranks see"
                    )
            draft = self.folder / f".{MANIFEST}-{self.name}"
            draft.write_text(json.dumps(with_checksum(content)), encoding="utf-8")
            draft.replace(self.folder / MANIFEST)
            for other in self.folder.glob("owner-*-of-*-*.safetensors"):
                if other.name not in names:
                    other.unlink(missing_ok=True)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of a folder."""
        with _explained("load", folder, MANIFEST):
            found = parse_json(read_plain(folder / MANIFEST, MAX_JSON_BYTES))
            if not isinstance(found, dict) or found.get("format") != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            if is_changed(found):
                raise ValueError("its checksum differs")
            owners = int(found["owners"])
            keys = [
                KeySpec.of(
                    decode(key["name"], {}), number, key["shape"], _DTYPES[key["dtype"]], owners
                )
                for number, key in enumerate(found["keys"])
            ]
            return Manifest(
                folder, str(found["name"]), owners, str(found["optimizer"]), tuple(keys)
            )


def write_ranges(path: Path, ranges: Mapping[int, KeyRange]) -> None:
    """Write the file of an owner."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor, where: str) -> str:
        if tensor.dtype not in STORABLE or tensor.layout != torch.strided:
            raise TypeError(f"{where} is {dtype_name(tensor.dtype)}, {tensor.layout}")
        tensors[where] = tensor.detach().contiguous()
        return where

    with _explained("save", path.parent):
        states: dict[str, Any] = {}
        for number, its in ranges.items():
            keep(its.values, _values(number))
            states[str(number)] = encode(its.state, f"{number}/state", keep)
        path.parent.mkdir(parents=True, exist_ok=True)
        states[_CHECKSUMS] = {name: _checksum(tensor) for name, tensor in tensors.items()}
        text = json.dumps(with_checksum(states))
        safetensors.torch.save_file(tensors, path, {"states": text})


def _checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's dtype, shape and bytes."""
    plain = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)} {checksum(plain.data)}"


def _values(number: int) -> str:
    return f"{number}/values"


def read_ranges(
    saved: Manifest, specs: Sequence[KeySpec], place: int, make: MakeOptimizer | None, average: bool
) -> dict[int, KeyRange]:
    """Return the ranges of an owner with their optimizers' state; ``specs`` are in saved order."""
    found = {}
    with _explained("load", saved.folder), contextlib.ExitStack() as opened:
        files = _Files(saved, opened)
        for spec, old in zip(specs, saved.keys, strict=True):
            if place in spec.places:
                values, state = files.rows(old, spec.range_of(place))
                its = found[spec.number] = KeyRange(values, make, average)
                its.state.update(state)
    return found


class _Files:
    """The files of a checkpoint, each opened when it is first read."""

    def __init__(self, saved: Manifest, opened: contextlib.ExitStack) -> None:
        self._saved, self._opened = saved, opened
        self._files: dict[int, tuple[Any, dict[str, Any], dict[str, list[str]]]] = {}

    def rows(self, old: KeySpec, wanted: slice) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the values of rows, and the state of their optimizer."""
        ranges = {place: old.range_of(place) for place in old.places}
        places = [p for p, r in ranges.items() if r.start < wanted.stop and wanted.start < r.stop]
        places.sort(key=lambda place: ranges[place].start)
        parts = [self._part(place, old) for place in places]
        if [ranges[place] for place in places] == [wanted]:
            return parts[0]
        first = ranges[places[0]].start
        rows = slice(wanted.start - first, wanted.stop - first)
        lengths, states = [len(values) for values, _ in parts], [state for _, state in parts]
        joined = {
            name: _joined(old, name, [state.get(name) for state in states], lengths, rows)
            for name in dict.fromkeys(itertools.chain(*states))
        }
        return torch.cat([values for values, _ in parts])[rows].clone(), joined

    def _part(self, place: int, old: KeySpec) -> tuple[torch.Tensor, dict[str, Any]]:
        with _explained("load", self._saved.folder, self._saved.file_of(place).name):
            file, states, names = self._open(place)
            # copies, because the others lie in the file
            tensors = {name: file.get_tensor(name).clone() for name in names[str(old.number)]}
            for name, tensor in tensors.items():
                if states.get(_CHECKSUMS, {}).get(name) not in (None, _checksum(tensor)):
                    raise ValueError(f"the checksum of {name} differs")
            values = tensors[_values(old.number)]
            if tuple(values.shape) != old.range_shape(place) or values.dtype != old.dtype:
                raise ValueError(f"the values of {old.name!r} are others")
            return values, decode(states[str(old.number)], tensors)

    def _open(self, place: int) -> tuple[Any, dict[str, Any], dict[str, list[str]]]:
        if place not in self._files:
            path = self._opened.enter_context(mappable(self._saved.file_of(place)))
            file = self._opened.enter_context(safe_open(path, "pt"))
            names: dict[str, list[str]] = {}
            for name in file.keys():  # noqa: SIM118
                names.setdefault(name.partition("/")[0], []).append(name)
            states = parse_json((file.metadata() or {})["states"].encode())
            if is_changed(states):
                raise ValueError("the checksum of its states differs")
            self._files[place] = file, states, names
        return self._files[place]


def _joined(
    old: KeySpec, name: str, states: Sequence[Any], lengths: Sequence[int], rows: slice
) -> Any:
    """Return these rows of tensors of all rows, joined; of numbers, such as steps, the largest."""
    each = [
        isinstance(s, torch.Tensor) and s.shape[:1] == (n,)
        for s, n in zip(states, lengths, strict=True)
    ]
    if all(each):
        return torch.cat(list(states))[rows].clone()
    if all(isinstance(s, (int, float)) or getattr(s, "ndim", None) == 0 for s in states):
        return max(states, key=float)
    same = len(states) == 1 or all(isinstance(s, str | None) and s == states[0] for s in states)
    if same and not isinstance(states[0], torch.Tensor):
        return states[0]
    raise ValueError(
        f'the optimizer\'s "{name}" of {old.name!r} is {kind_of(states[0])}, which cannot be shared '
        "out to other owners: use as many as there were"
    )


@contextlib.contextmanager
def _explained(doing: str, folder: Path, file: str = "") -> Iterator[None]:
    """Raise an error of the block as :class:`sparkdl.CheckpointError`, which names the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        what = str(error) if not isinstance(error, KeyError) else f"it has no {error}"
        where = f"{file}: " if file and not isinstance(error, OSError) else ""
        raise CheckpointError(
            f'Cannot {doing} the parameter server in "{folder}": {where}{what or kind_of(error)}.'
        ) from error
