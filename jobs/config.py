"""The configuration of a job: YAML and ``--set key=value``, with all mistakes in one error."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from jobs.components import Component
from jobs.sections import Config, Single
from sparkdl import ParameterError
from sparkdl.codec.describe import REDACTED
from sparkdl.errors import nearest, raise_all


def read_config(path: str | Path, changes: Sequence[str] = ()) -> Config:
    """Return the configuration in the YAML file ``path`` after the ``key=value`` changes.

    Raises :class:`sparkdl.ParameterError` that lists every mistake, and FileNotFoundError.
    """
    content = read_yaml(path)
    problems = []
    for change in changes:
        try:
            apply_change(content, change)
        except ParameterError as error:
            problems.append(str(error))
    raise_all(ParameterError, problems)
    try:
        return parse(content)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ParameterError, FileNotFoundError."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no configuration file {path}.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ParameterError(f"{path}: this is not UTF-8 ({error}).") from None
    content = _load(text, str(path))
    if not isinstance(content, dict):
        raise ParameterError(f"{path}: give a mapping of keys to values.")
    return content


def apply_change(content: dict[str, Any], change: str) -> None:
    """Apply ``a.b=value``: set ``content["a"]["b"]`` to the value, which is read as YAML."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ParameterError(f'--set "{change}": give NAME=VALUE, such as training.epochs=5.')
    value = _load(text, f"--set {key}")
    parts = key.strip().split(".")
    if tuple(parts[:2]) in _FLAT and len(parts) > 2:
        parts = [*parts[:2], ".".join(parts[2:])]
    for i, part in enumerate(parts[:-1]):
        inner = content.get(part)
        if isinstance(inner, str) and _is_component(parts[: i + 1]):
            inner = content[part] = {"use": inner}
        elif inner is None:
            inner = content[part] = {}
        if not isinstance(inner, dict):
            raise ParameterError(f'--set "{key}": {".".join(parts[: i + 1])} has no keys below it.')
        content = inner
    content[parts[-1]] = value


def parse(content: dict[str, Any]) -> Config:
    """Parse plain values as a configuration. Raises ParameterError that lists every mistake."""
    problems = [
        f"{key} was redacted when it was written: give it again, with --set {key}=..."
        for key, value in _leaves(content, "")
        if isinstance(value, str) and REDACTED in value
    ]
    config = _section(Config, content, "", problems)
    raise_all(ParameterError, problems)
    return config


# Mappings whose keys hold dots of their own.
_FLAT = {
    ("spark", "settings"),
    ("data", "options"),
    ("gradients", "l1"),
    ("gradients", "l2"),
    ("care", "buffers"),
    ("tune", "space"),
}

_WANTED = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _section(kind: type[Any], content: Any, prefix: str, problems: list[str]) -> Any:
    """Make a dataclass of ``kind`` from a mapping, and add its mistakes to ``problems``."""
    hints = typing.get_type_hints(kind)
    if not isinstance(content, dict):
        problems.append(f"{prefix[:-1]}: give a mapping with {', '.join(hints)}.")
        return None
    for key in content:
        if key not in hints:
            near = nearest(str(key), hints).replace('"', f'"{prefix}', 1) or _elsewhere(str(key))
            problems.append(f'unknown key "{prefix}{key}".{near} Known here: {", ".join(hints)}.')
    values = {}
    for f in dataclasses.fields(kind):
        if f.name in content:
            values[f.name] = _value(hints[f.name], content[f.name], prefix + f.name, problems)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            problems.append(f"{prefix}{f.name} is missing.")
            values[f.name] = None
    return kind(**values)


def _value(hint: Any, value: Any, key: str, problems: list[str]) -> Any:
    section = _section_of(hint)
    if section is not None and not (value is None and type(None) in _options(hint)):
        return _section(section, {} if value is None else value, f"{key}.", problems)
    try:
        return _converted(hint, value)
    except ParameterError as error:
        problems.append(f"{key}: {error}")
    except TypeError:
        quote = _quoted(hint, value)
        problems.append(f"{key}: give {_wanted(hint)}, not {_shown(type(value))}{quote}.")
    return None


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _section_of(hint: Any) -> Any:
    """Return the section that ``hint`` stands for, optional or not; None if it stands for a value."""
    found = [o for o in _options(hint) if dataclasses.is_dataclass(o) and o is not Component]
    return found[0] if found else None


def _converted(hint: Any, value: Any) -> Any:
    """Convert ``value`` to the first type of ``hint`` that accepts it.

    Raises TypeError if none does, and ParameterError for a wrong component.
    """
    if value is None and type(None) in _options(hint):
        return None
    failure: ParameterError | TypeError = TypeError(hint)
    for option in _options(hint):
        try:
            return _as(option, value)
        except ParameterError as error:
            failure = error if isinstance(failure, TypeError) else failure
        except TypeError:
            continue
    raise failure


def _as(kind: Any, value: Any) -> Any:
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is Component:
        return Component.of(value)
    if origin is dict and isinstance(value, (dict, type(None))):
        return dict(_entry(*inner, name, entry) for name, entry in (value or {}).items())
    if origin is list and isinstance(value, list):
        return [_item(inner[0], entry) for entry in value]
    if kind is float and type(value) is int:
        return float(value)
    if kind is Any or type(value) is kind:
        return value
    raise TypeError(kind)


def _item(kind: Any, value: Any) -> Any:
    try:
        return _converted(kind, value)
    except TypeError:
        raise ParameterError(
            f"{value!r} in the list: give {_wanted(kind)}{_quoted(kind, value)}."
        ) from None


def _quoted(hint: Any, value: Any) -> str:
    number = isinstance(value, (int, float)) and str in _options(hint)
    return f" (quote it: '{value}')" if number else ""


def _entry(key: Any, kind: Any, name: Any, value: Any) -> tuple[Any, Any]:
    if key is str and not isinstance(name, str):
        raise ParameterError(f"the key {name!r} is not text: quote it.")
    try:
        return name, _converted(kind, value)
    except TypeError:
        wanted = "a single value" if kind == Single else _wanted(kind)
        raise ParameterError(f'"{name}": give {wanted}, not {_shown(type(value))}.') from None


def _wanted(hint: Any) -> str:
    return " or ".join(_shown(option) for option in _options(hint))


def _shown(kind: Any) -> str:
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is list:
        what = {str: " of texts", float: " of numbers"}.get(inner[0] if inner else None, "")
        return f"a list{what}"
    if origin is dict:
        return "a mapping"
    return _WANTED.get(origin, f"a {getattr(origin, '__name__', origin)}")


def _elsewhere(key: str) -> str:
    """Name the section in which a misplaced key would be right."""
    for name, hint in typing.get_type_hints(Config).items():
        section = _section_of(hint)
        close = section and nearest(key, typing.get_type_hints(section))
        if close:
            return close.replace('"', f'"{name}.', 1)
    return ""


def _is_component(path: Sequence[str]) -> bool:
    hint = typing.get_type_hints(Config).get(path[0]) if len(path) == 1 else None
    return Component in _options(hint)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


class _Loader(yaml.SafeLoader):
    """A loader of safe YAML, in which 1e-3 is a number and a repeated key is an error."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # type: ignore[no-untyped-call]
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key "{key}" is given twice', key_node.start_mark
                )
            seen.add(key)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # 2026-13-01 is no date
            raise yaml.constructor.ConstructorError(
                None, None, f'"{node.value}" cannot be read ({error}): quote it', node.start_mark
            ) from None


_MERGE = "tag:yaml.org,2002:merge"
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _load(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ParameterError(f"{where}{line}: {error.problem or 'this is not YAML'}.") from None
    except yaml.YAMLError as error:
        raise ParameterError(f"{where}: this is not YAML ({error}).") from None
