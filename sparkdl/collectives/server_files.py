"""The files of a parameter server's checkpoint: one of each owner, and a manifest that names them.

An owner writes its ranges and the state of their optimizers as safetensors. The manifest is written
last, and replaces the one before, so that a folder always has a whole checkpoint. It says how the
rows were shared out; whoever reads looks up the files that have the wanted rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from sparkdl.collectives.arguments import name_of
from sparkdl.collectives.key_range import KeyRange, KeySpec, MakeOptimizer
from sparkdl.errors import CheckpointError, ParameterError, kind_of, shown

MANIFEST, FORMAT = "parameter_server.json", 1
_CHECKSUMS = "checksums"
"""The key of the tensors' checksums, beside the states of an owner's file."""
_DTYPES = {name_of(dtype): dtype for dtype in STORABLE}


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
            {"name": encode(s.name, "key"), "shape": list(s.shape), "dtype": name_of(s.dtype)}
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
        with _explained("load", folder), _naming(MANIFEST):
            found = parse_json(read_plain(folder / MANIFEST, MAX_JSON_BYTES))
            if not isinstance(found, dict) or found.get("format") != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            if is_changed(found):
                raise ValueError("its checksum differs")
            owners = int(found["owners"])
            keys = [
                KeySpec.shared(
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
            raise TypeError(f"{where} is {name_of(tensor.dtype)}, {tensor.layout}")
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
    return f"{name_of(tensor.dtype)} {list(tensor.shape)} {checksum(plain.data)}"


def _values(number: int) -> str:
    return f"{number}/values"


def read_ranges(
    saved: Manifest,
    specs: Sequence[KeySpec],
    place: int,
    make: MakeOptimizer | None,
    average: bool,
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
        parts = []
        for place in old.places:
            its = old.range_of(place)
            start, stop = max(its.start, wanted.start), min(its.stop, wanted.stop)
            if start < stop:
                with _naming(self._saved.file_of(place).name):
                    parts.append((start, self._part(place, old, slice(start, stop))))
        parts.sort(key=lambda part: part[0])
        values = torch.cat([values for _, (values, _) in parts])
        return values, _joined(old, [state for _, (_, state) in parts])

    def _part(self, place: int, old: KeySpec, wanted: slice) -> tuple[torch.Tensor, dict[str, Any]]:
        file, states, names = self._open(place)
        its = old.range_of(place)
        cut = slice(wanted.start - its.start, wanted.stop - its.start)
        # copies, because the others lie in the file
        tensors = {name: file.get_tensor(name).clone() for name in names[str(old.number)]}
        for name, tensor in tensors.items():
            if states.get(_CHECKSUMS, {}).get(name) not in (None, _checksum(tensor)):
                raise ValueError(f"the checksum of {name} differs")
        values = tensors[_values(old.number)]
        if tuple(values.shape) != old.range_shape(place) or values.dtype != old.dtype:
            raise ValueError(f"the values of {old.name!r} are others")
        state = decode(states[str(old.number)], tensors)
        if wanted != its:
            count = len(values)
            state = {name: _cut(old, name, one, count, cut) for name, one in state.items()}
        return values[cut], state

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


def _cut(old: KeySpec, name: str, one: Any, rows: int, wanted: slice) -> Any:
    """Return what an optimizer knows of some of its rows: numbers are known of all."""
    if not isinstance(one, torch.Tensor) or one.dim() == 0:
        return one
    if len(one) != rows:
        raise _not_shared(old, name, one)
    return one[wanted].clone()


def _joined(old: KeySpec, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of an optimizer of rows that several optimizers have updated."""
    names = dict.fromkeys(name for state in states for name in state)
    return {name: _joined_one(old, name, [state.get(name) for state in states]) for name in names}


def _joined_one(old: KeySpec, name: str, given: Sequence[Any]) -> Any:
    """Return tensors of rows joined; of numbers, such as counts of steps, the largest."""
    one = given[0]
    if len(given) == 1 or all(each is None for each in given):
        return one
    if all(isinstance(each, torch.Tensor) for each in given):
        return torch.cat(list(given)) if one.dim() else max(given, key=float)
    if all(isinstance(each, (int, float)) for each in given):
        return max(given)
    raise _not_shared(old, name, one)


def _not_shared(old: KeySpec, name: str, one: Any) -> ValueError:
    return ValueError(
        f'the optimizer\'s "{name}" of {old.name!r} is {kind_of(one)}, which cannot be shared out to '
        "other owners: use as many as there were"
    )


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the file in the error of a block that reads it."""
    try:
        yield
    except (ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name}: {what or kind_of(error)}") from error


@contextlib.contextmanager
def _explained(doing: str, folder: Path) -> Iterator[None]:
    """Raise an error of the block as :class:`sparkdl.CheckpointError`."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        what = str(error) if not isinstance(error, KeyError) else f"it has no {error}"
        raise CheckpointError(
            f'Cannot {doing} the parameter server in "{folder}": {what or kind_of(error)}.'
        ) from error
