"""The content of a history in files: as safetensors, as JSON and as CSV.

Checkpoints hold safetensors, in which a number takes 8 bytes. JSON takes twice as many, and needs
seconds to write the history of a long run, every time.

The content of JSON and CSV is ``{"iterations": [record, ...], "epochs": [...], "validations":
[record, ...], "timings": {activity: [seconds or None, ...]}, "start": {...}, "stopped": reason or
None}``, of plain values; "losses", like "timings", if a step returned named losses; and "decisions",
``{name: [number, ...]}``, if a consistency model made any.
"""

from __future__ import annotations

import csv
import io
import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from sparkdl.codec.files import parse_json, parse_tensors
from sparkdl.errors import ParameterError
from sparkdl.replica.iteration import COMMITS, INNER_STEPS, MICRO_BATCHES, STALENESS

KINDS = {  # the keys of a record in their order -> type of the values
    "iteration": int,
    "epoch": int,
    "loss": float,
    "learning_rate": float,
    "samples": int,
    "seconds": float,
    "gradient_norm": float,
    "loss_scale": float,
    "skipped": bool,
    "bytes_sent": int,
}
_TIMING, _LOSS, _METRIC = "timings/", "losses/", "validation/"
DTYPES = {"q": torch.int64, "d": torch.float64}
_DECISIONS, _DECIDED = "decisions", (STALENESS, MICRO_BATCHES, INNER_STEPS, COMMITS)
_REST = "history"


def to_safetensors(
    columns: Mapping[str, array[Any]], length: int, rest: Mapping[str, Any]
) -> bytes:
    """Return the file as bytes, with the first ``length`` numbers of each column."""
    # by way of torch, each new length would leave a ctypes class behind
    arrays = {
        name: np.frombuffer(column, dtype=column.typecode, count=length)
        if length
        else np.empty(0, dtype=column.typecode)
        for name, column in columns.items()
    }
    return safetensors.numpy.save(arrays, {_REST: json.dumps(rest)})


def from_safetensors(
    data: bytes, codes: Mapping[str, str]
) -> tuple[dict[str, array[Any]], dict[str, Any]]:
    """Read the columns and the rest from the bytes that :func:`to_safetensors` made.

    ``codes`` has the typecodes of the columns that must be there; others have "d". Wrong content
    raises ValueError, KeyError or TypeError.
    """
    tensors, metadata = parse_tensors(data)
    missing = [name for name in codes if name not in tensors]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}")
    columns = {}
    for name, tensor in tensors.items():
        code = codes.get(name, "d")
        if tensor.ndim != 1 or tensor.dtype != DTYPES[code]:
            raise ValueError(f"its {name} is {list(tensor.shape)} of {tensor.dtype}")
        column = columns[name] = array(code)
        column.frombytes(tensor.numpy().tobytes())
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError("its columns differ in length")
    rest = parse_json(metadata[_REST].encode())
    if not isinstance(rest, dict):
        raise ValueError("its metadata is not an object")
    return columns, rest


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file in the format that its suffix names."""
    text = to_csv(content) if _is_csv(path) else to_json(content, indent=1) + "\n"
    path.write_text(text, encoding="utf-8", newline="")


def read(path: Path) -> dict[str, Any]:
    """Read a file in the format that its suffix names."""
    if not _is_csv(path):
        return from_json(path.read_bytes(), str(path))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return from_csv(file.read())
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ParameterError(f"{path} is not a history ({error}).") from error


def to_json(content: dict[str, Any], indent: int | None = None) -> str:
    """Return the content as JSON.

    Floats are their shortest exact decimals; NaN and Infinity are as Python's json writes them.
    """
    separators = (",", ":") if indent is None else None
    return json.dumps(content, indent=indent, separators=separators)


def from_json(data: bytes, where: str = "it") -> dict[str, Any]:
    """Parse the text that :func:`to_json` returns."""
    try:
        content = parse_json(data)
    except ValueError as error:
        raise ParameterError(f"{where} is not a history ({error}).") from error
    if not isinstance(content, dict):
        raise ParameterError(f"{where} is not a history: it is not a JSON object.")
    return content


def to_csv(content: dict[str, Any]) -> str:
    """Return the content as a header and one row for each iteration. Values that were not measured
    are empty."""
    validated: dict[int, dict[str, float]] = {}
    for record in content["validations"]:
        validated.setdefault(record["iteration"], {}).update(record["metrics"])
    metrics = list(dict.fromkeys(name for found in validated.values() for name in found))
    named = {_TIMING + name: column for name, column in content["timings"].items()}
    named |= {_LOSS + name: column for name, column in content.get("losses", {}).items()}
    named |= content.get(_DECISIONS, {})
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow([*KINDS, *named, *(_METRIC + m for m in metrics)])
    for i, row in enumerate(content["iterations"]):
        found = validated.get(row["iteration"], {})
        others = [column[i] for column in named.values()]
        writer.writerow([*row.values(), *others, *(found.get(name) for name in metrics)])
    return file.getvalue()


def from_csv(text: str) -> dict[str, Any]:
    """Parse the table that :func:`to_csv` returns. Only what the table contains is in the result."""
    reader = csv.DictReader(io.StringIO(text))
    names = reader.fieldnames or []
    rows: list[dict[str, Any]] = []
    validations = []
    timings, losses = (
        {name.removeprefix(kind): list[float | None]() for name in names if name.startswith(kind)}
        for kind in (_TIMING, _LOSS)
    )
    decided = {name: list[int]() for name in names if name.startswith(_DECIDED)}
    for line in reader:
        row = {name: _value(kind, line.get(name) or "") for name, kind in KINDS.items()}
        rows.append(row)
        for name, numbers in decided.items():
            numbers.append(int(line[name]))
        for kind, columns in ((_TIMING, timings), (_LOSS, losses)):
            for name, column in columns.items():
                column.append(_value(float, line[kind + name]))
        metrics = {
            name.removeprefix(_METRIC): float(line[name])
            for name in names
            if name.startswith(_METRIC) and line[name]
        }
        if metrics:
            where = {"iteration": row["iteration"], "epoch": row["epoch"]}
            validations.append({**where, "metrics": metrics})
    found = {"iterations": rows, "timings": timings, "losses": losses, "validations": validations}
    return {**found, _DECISIONS: decided} if decided else found


def _value(kind: type, text: str) -> Any:
    if text == "":
        return None
    return text == "True" if kind is bool else kind(text)


def _is_csv(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ParameterError(f'history file "{path}": end its name in .json or .csv.')
    return suffix == ".csv"
