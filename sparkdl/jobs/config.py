"""The keys of a job, and what YAML files and the command line give for them.

Neither torch nor Spark is imported here, so that a mistyped key is told at once. The fields of
:class:`sparkdl.Trainer` are keys without being listed: they are read from its source. What a value
may be is checked by what takes it.
"""

from __future__ import annotations

import ast
import json
import pkgutil
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkdl.codec.describe import REDACTED
from sparkdl.errors import ParameterError, nearest, optional_library, raise_all

_TRAINING = """
name: run
runs: runs
data: {train: "???", test: null, format: parquet, options: {}, select: null, prepare: null}
model: "???"
loss: null
step: null
optimizer: "???"
schedule: null
trainer: {epochs: 10, max_iterations: null, max_seconds: null, min_loss: null, histograms: null}
validation: {data: null, share: null, metrics: [], every_epochs: null, every_iterations: null,
  best: null, batch_size: 1024}
early_stopping: {metric: loss, patience: null, min_delta: 0.0, target: null}
checkpoint: {path: null, every_epochs: null, every_iterations: null, every_seconds: null, keep: 3}
metrics: []
summaries: {csv: false, tensorboard: false, mlflow: false}
tune: {space: {}, metric: loss, trials: null, algorithm: random, parallel: null, seed: 0}
callbacks: []
spark: {master: null, settings: {}}
"""
"""The keys of a training and a search, with their defaults; "???" marks what must be given."""
_SAVED = """
model: "???"
data: "???"
format: parquet
options: {}
select: null
master: local[2]
"""
_KEYS = {
    "evaluate": f"{_SAVED}metrics: null\nloss: null",
    "predict": f'{_SAVED}output: "???"\noutput_format: parquet\ncolumn: prediction',
}
_UNLESS_GIVEN = ("validation", "early_stopping", "checkpoint")
"""Sections that are null unless any of their keys is given."""
_OF_DATA = (
    *("features", "label", "weight", "columns", "handle_invalid", "key", "augment"),
    *("bucketing", "sampling", "class_weights"),
)
"""The fields of the trainer that are keys of ``data``."""
_NO_KEYS = ("stop", "resource_profile", "keep_optimizer_state")
_YAML = (".yaml", ".yml")


def defaults_of(command: str) -> dict[str, Any]:
    """Return the keys of a command with their defaults. Raises ParameterError without the libraries."""
    optional_library("omegaconf", "a job", "jobs")
    import yaml

    keys: dict[str, Any] = yaml.safe_load(_KEYS.get(command, _TRAINING))
    if command in _KEYS:
        return keys
    source = pkgutil.get_data("sparkdl", "train/spec.py")  # importing it takes seconds
    (spec,) = (node for node in ast.parse(source or b"").body if isinstance(node, ast.ClassDef))
    for node in spec.body:
        name = ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else "stop"
        if isinstance(node, ast.AnnAssign) and name not in {*keys, *keys["trainer"], *_NO_KEYS}:
            given = {each.arg: each.value for each in getattr(node.value, "keywords", ())}
            value = given.get("default", ast.Dict([], []) if given else node.value)
            default = ast.literal_eval(value or "")
            section = keys["data" if name in _OF_DATA else "trainer"]
            section[name] = [] if default == () else default
    return keys


def parse(
    command: str, arguments: Sequence[str], names: Collection[str], lines: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of a command and its options, as arguments and their files give them.

    Add to ``lines`` where each key is given, for messages. Raises ParameterError.
    """
    defaults, words, given = defaults_of(command), [*arguments], dict[str, Any]()
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    options: dict[str, Any] = {each.split()[0]: None if " " in each else False for each in names}
    while words:
        name, equals, text = words.pop(0).partition("=")
        key = name.removeprefix("--")
        if key in names:
            options[key] = True
            continue
        if key == name or not (equals or (words and not words[0].startswith("--"))):
            form = f"--config {name}" if name.endswith(_YAML) else "--KEY VALUE"
            raise ParameterError(f"{name}: give {form}; sparkdl {command} --help lists all keys.")
        text = text if equals else words.pop(0)
        if key in options:
            options[key] = text
        if key == "config" or (text.endswith(_YAML) and "." not in key):
            given = _merge(given, _read(Path(text), "" if key == "config" else key, lines))
        elif key not in options:
            parts, value = key.split("."), _value(text)
            lines |= {".".join(parts[: i + 1]): "" for i in range(len(parts))}
            for part in reversed(parts):
                value = {part: value}
            given = _merge(given, value)
    if options.get("resume") and not options["config"]:
        of_run: dict[str, str] = {}
        given = _merge(_read(Path(options["resume"]) / "config.yaml", "", of_run), given)
        lines |= {**of_run, **lines}
    raise_all(ParameterError, list(_unknown(lines, set(_dotted(defaults)))))
    for name in _UNLESS_GIVEN:
        if name in defaults and given.get(name) is None:
            defaults[name] = None
    merged = _merge(defaults, given)
    sections = [name for name, value in defaults.items() if isinstance(value, dict)]
    wrong = [name for name in sections if not isinstance(merged[name], dict)]
    raise_all(ParameterError, [f"{name}: give a mapping of keys to values." for name in wrong])
    try:
        keys: Any = OmegaConf.create(merged)
        missing = sorted(OmegaConf.missing_keys(keys))
        keys = _decoded(merged, OmegaConf.to_container(keys, resolve=True))
    except OmegaConfBaseException as error:
        raise ParameterError(f"{error.full_key}: {error}".split("\n")[0]) from None
    if options.get("print_config"):
        print(yaml.safe_dump(keys, sort_keys=False, allow_unicode=True), end="")
    elif missing:
        hint = "" if options.get("config") or command in _KEYS else " Give --config FILE."
        raise ParameterError(f"missing: {', '.join(missing)}.{hint}")
    for section, name in (("data", "options"), ("spark", "settings"), ("tune", "space")):
        if command not in _KEYS:
            keys[section][name] = flat(keys[section][name] or {})
    hidden = [key for key, value in flat(keys).items() if REDACTED in str(value)]
    sentence = "{0} was redacted when it was written: give it again, with --{0}=..."
    raise_all(ParameterError, [sentence.format(key) for key in hidden])
    return keys, options


def _read(file: Path, key: str, lines: dict[str, str]) -> dict[str, Any]:
    """Return what a YAML file gives, below ``key`` if it is a section; add the lines of its keys."""
    import yaml
    from omegaconf import OmegaConf

    def place(node: Any, prefix: str) -> None:
        for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
            lines[prefix + str(name.value)] = f" (line {name.start_mark.line + 1} of {file})"
            place(value, f"{prefix}{name.value}.")

    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(file))
        place(yaml.compose(file.read_text(encoding="utf-8")), f"{key}." if key else "")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ParameterError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ParameterError(f"{file}: give a mapping of keys to values.")
    for name, value in content.items():
        if isinstance(value, str) and value.endswith(_YAML) and not key:
            content |= _read(file.parent / value, name, lines)
    return {key: content} if key else content


def _value(text: str) -> Any:
    """Return what YAML reads in an argument, or its text where YAML reads nothing, as in "|"."""
    import yaml
    from omegaconf import OmegaConf

    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except yaml.YAMLError:
        return text
    assert isinstance(value, dict)
    empty = value["value"] in (None, "") and text not in ("null", "~", "", "''", '""')
    return text if empty else value["value"]


def _decoded(raw: Any, value: Any) -> Any:
    """Return a value with numbers and words of JSON where variables have their text."""
    if isinstance(value, dict) and isinstance(raw, dict):
        return {name: _decoded(raw[name], each) for name, each in value.items()}
    if isinstance(value, str) and isinstance(raw, str) and raw.startswith("${"):
        decoded = _value(value)
        return decoded if json.dumps(decoded) == value else value
    return value


def _merge(old: Any, new: Any) -> Any:
    """Return a mapping with the values of another in it; a component, or any other value, replaces.

    What is set in a component is an argument of it, as by ``--optimizer.lr 1e-3``.
    """
    if not isinstance(old, dict) or not isinstance(new, dict) or "class_path" in new:
        return new
    if "class_path" in old and "init_args" not in new:
        new = {"init_args": new}
    return {**old, **{name: _merge(old.get(name), value) for name, value in new.items()}}


def flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """Join nested keys with dots, as in ``spark.executor.memory``, except inside of a component."""
    joined: dict[str, Any] = {}
    for name, value in content.items():
        nested = isinstance(value, dict) and "class_path" not in value
        joined |= {f"{name}.{k}": v for k, v in flat(value).items()} if nested else {name: value}
    return joined


def _dotted(keys: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in keys.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")


def _unknown(lines: Mapping[str, str], known: Collection[str]) -> Iterator[str]:
    """Yield a sentence about each unknown key: the nearest one, in its section or in another."""
    for key, line in lines.items():
        section, _, name = key.rpartition(".")
        beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
        if key not in known and beside:
            hint = f"Known here: {', '.join(sorted(beside))}."
            for names in ({k.rpartition(".")[2]: k for k in sorted(known, reverse=True)}, beside):
                if match := re.search('"(.+)"', nearest(name, names)):
                    hint = f'Did you mean "{names[match[1]]}"?'
            yield f'unknown key "{key}". {hint}{line}'


def with_lines(message: str, lines: Mapping[str, str]) -> str:
    """Return the message of a mistake with the lines of the keys that its lines begin with."""

    def placed(line: str) -> str:
        key = re.split("[:= ]", line.removeprefix("  - "))[0]
        keys = (key, f"trainer.{key}", f"data.{key}")
        return line + next((lines[each] for each in keys if each in lines), "")

    return "\n".join(map(placed, message.split("\n")))
