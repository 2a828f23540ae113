"""Files that were changed on their way: mutations of bytes, of JSON, and of safetensors headers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

STRANGE: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "nan",
    "../x",
    "../../sentinel/x",
    "/etc/passwd",
    "a\0b",
    ".",
    "..",
    "con\n",
    "\ud800",
    "é" * 50,
    "x" * 5000,
    "F4",
    "F8_E8M0",
    "I32",
    "float64",
    "V1000000",
    [],
    {},
    [[]],
    {"a": 1},
    {"tensor": "weights"},
    {"tuple": [1]},
    {"dict": [[[], 1]]},
    {"float": "1e9999"},
    [0, 2**62, 4],
    [1] * 70,
    ["a", "a"],
]
LENGTHS = [0, 1, 7, 8, 100, 2**20, 100_000_000, 100_000_001, 2**31, 2**62, 2**63, 2**64 - 1]


def flip(data: bytes, chance: random.Random) -> bytes:
    """A few bits."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def extend(data: bytes, chance: random.Random) -> bytes:
    return data + chance.choice([b"\0", b" ", b"}", data[:9], chance.randbytes(100)])


def splice(data: bytes, chance: random.Random) -> bytes:
    """A part goes, comes twice, or goes elsewhere."""
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    part, rest = data[a:b], data[:a] + data[b:]
    place = chance.randrange(len(rest) + 1)
    return chance.choice([rest, data[:b] + data[a:], rest[:place] + part + rest[place:]])


def overwrite(data: bytes, chance: random.Random) -> bytes:
    noise = chance.randbytes(chance.randrange(1, 64))
    place = chance.randrange(len(data))
    return data[:place] + noise + data[place + len(noise) :]


BYTES: list[Mutation] = [flip, flip, cut, extend, splice, overwrite]


def edit_json(data: bytes, chance: random.Random) -> bytes:
    """One to three places of a JSON document get another value, another key, or go."""
    content = json.loads(data)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        content = edit(content, chance)
    return written(content)


def edit(content: Any, chance: random.Random) -> Any:
    """A copy of nested plain values with one place changed."""
    content = copy.deepcopy(content)
    places = list(_places(content)) if isinstance(content, (dict, list)) else []
    if not places:
        return chance.choice(STRANGE)
    holder, key = chance.choice(places)
    kind = chance.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.extend([holder[key]] * chance.choice([1, 3]))
    elif kind == 1:
        holder[str(chance.choice(STRANGE))] = holder.pop(key)
    elif kind == 2:
        other, name = chance.choice(places)
        holder[key] = copy.deepcopy(other[name])
    elif kind == 3 and isinstance(holder[key], int):
        holder[key] += chance.choice([-1, 1, 64, -64, 10**6])
    else:
        holder[key] = copy.deepcopy(chance.choice(STRANGE))
    return content


def _places(content: Any) -> Any:
    for key in content if isinstance(content, dict) else range(len(content)):
        yield content, key
        if isinstance(content[key], (dict, list)):
            yield from _places(content[key])


def written(content: Any) -> bytes:
    return json.dumps(content).encode("utf-8", "surrogatepass")


def spoil_json(data: bytes, chance: random.Random) -> bytes:
    """Text that no ``json.dumps`` would write."""
    text = data.decode()
    first = text.index("{") + 1
    depth = chance.choice([10, 1000, 100_000])
    number = chance.choice(["9" * 5000, "1e99999", "-1e99999", "NaN", "1" * 300, "-0"])
    key = json.dumps(next(iter(json.loads(text))))
    values = [
        f"{key}: 1, ",
        f'"again": 1, "again": {number}, ',
        f'"deep": {"[" * depth}{"]" * depth}, ',
        f'"deep": {"[" * depth} ',
        f'"big": {number}, ',
        '"\\u0000": "\\ud800", ',
        f'"long": "{"x" * 100_000}", ',
    ]
    return (text[:first] + chance.choice(values) + text[first:]).encode()


JSON: list[Mutation] = [edit_json, edit_json, edit_json, spoil_json]


def split_tensors(data: bytes) -> tuple[bytes, bytes]:
    """Header and body of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def joined(header: bytes, body: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + body


def edit_header(data: bytes, chance: random.Random) -> bytes:
    header, body = split_tensors(data)
    return joined(edit_json(header, chance), body)


def edit_metadata(data: bytes, chance: random.Random) -> bytes:
    """The JSON inside the metadata of a slice."""
    header, body = split_tensors(data)
    content = json.loads(header)
    metadata = content.get("__metadata__", {})
    name = chance.choice(sorted(metadata) or ["others"])
    try:
        metadata[name] = json.dumps(edit(json.loads(metadata.get(name, "[]")), chance))
    except ValueError:
        metadata[name] = str(chance.choice(STRANGE))
    content["__metadata__"] = metadata
    return joined(written(content), body)


def spoil_header(data: bytes, chance: random.Random) -> bytes:
    header, body = split_tensors(data)
    return joined(spoil_json(header, chance), body)


def lie_about_length(data: bytes, chance: random.Random) -> bytes:
    header, body = split_tensors(data)
    near = len(header) + chance.choice([-1, 1, 8, len(body), len(body) + 1])
    return joined(header, body, chance.choice([*LENGTHS, near]))


TENSORS: list[Mutation] = [
    edit_header,
    edit_header,
    edit_header,
    edit_metadata,
    edit_metadata,
    spoil_header,
    lie_about_length,
]
