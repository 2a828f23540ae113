"""The configuration of a job: its sections, and the parser of YAML files and command lines.

Neither torch nor Spark is imported here, so that a mistyped key is told at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkdl.codec.describe import REDACTED
from sparkdl.errors import ParameterError, nearest, raise_all

if typing.TYPE_CHECKING:
    from jsonargparse import ArgumentParser

Spec = str | dict[str, Any]
"""A name (``module.name`` or ``file.py:name``), or a mapping with ``class_path`` and ``init_args``."""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The samples, and the fields of the trainer that say how columns become tensors."""

    train: str
    test: str | None = None
    format: str = "parquet"
    options: dict[str, Any] = field(default_factory=dict)
    select: list[str] | None = None
    prepare: Spec | None = None
    features: str | list[str] | dict[str, str] = "features"
    label: str | list[str] | None = "label"
    weight: str | None = None
    class_weights: list[float] | dict[int, float] | str | None = None
    sampling: Spec | None = None
    columns: dict[str, Spec] = field(default_factory=dict)
    augment: Spec | None = None
    bucketing: int | None = None
    handle_invalid: str = "error"
    key: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainerSection:
    """The length of training, and all other fields of :class:`sparkdl.Trainer`."""

    epochs: int = 10
    max_iterations: int | None = None
    max_seconds: float | None = None
    min_loss: float | None = None
    batch_size: int = 256
    replicas: int | str | None = None
    min_ranks: int | None = None
    slices: int | None = None
    engine: str = "shuffle"
    strategy: Spec | list[Spec] = "ddp"
    mesh: dict[str, int] | None = None
    accumulate: int = 1
    local_steps: int = 1
    consistency: Spec | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    l1: float | dict[str, float] = 0.0
    l2: float | dict[str, float] = 0.0
    sync_batchnorm: bool = False
    on_nan: str = "raise"
    precision: str = "fp32"
    wire: str = "fp32"
    compression: Spec | None = None
    schedule_per: str = "iteration"
    schedule_metric: str | None = None
    output: str | int | None = None
    weights: str | None = None
    strict_weights: bool = True
    freeze: list[str] = field(default_factory=list)
    unfreeze: list[str] = field(default_factory=list)
    buffers: dict[str, Spec] = field(default_factory=dict)
    activation_checkpointing: list[str] = field(default_factory=list)
    compile: bool | dict[str, Any] = False
    ema: float | None = None
    histograms: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """Validation during training, on data of its own or on a share of the training data."""

    data: str | None = None
    share: float | None = None
    metrics: list[Spec] = field(default_factory=list)
    every_epochs: int | None = None
    every_iterations: int | None = None
    best: str | None = None
    batch_size: int = 1024


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingSection:
    """An early end of training, decided by the validation."""

    metric: str = "loss"
    patience: int | None = None
    min_delta: float = 0.0
    target: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Checkpoints, from which ``--resume`` goes on; in the run folder unless a path is given."""

    path: str | None = None
    every_epochs: int | None = None
    every_iterations: int | None = None
    every_seconds: float | None = None
    keep: int | None = 3


@dataclass(frozen=True, kw_only=True)
class SummariesSection:
    """The records of a run beside its history and curves."""

    csv: bool = False
    tensorboard: bool = False
    mlflow: bool = False


@dataclass(frozen=True, kw_only=True)
class TuneSection:
    """The values that ``sparkdl tune`` varies, by the names of their keys."""

    space: dict[str, Any] = field(default_factory=dict)
    metric: str = "loss"
    trials: int | None = None
    algorithm: Spec = "random"
    parallel: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SparkSection:
    """The Spark session, if ``spark-submit`` does not decide."""

    master: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of training and searching."""

    name: str = "run"
    runs: str = "runs"
    data: DataSection
    model: Spec
    loss: Spec | None = None
    step: Spec | None = None
    optimizer: Spec
    schedule: Spec | None = None
    trainer: TrainerSection = TrainerSection()
    validation: ValidationSection | None = None
    early_stopping: EarlyStoppingSection | None = None
    checkpoint: CheckpointSection | None = None
    metrics: list[Spec] = field(default_factory=list)
    summaries: SummariesSection = SummariesSection()
    tune: TuneSection = TuneSection()
    callbacks: list[Spec] = field(default_factory=list)
    spark: SparkSection = SparkSection()


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A saved model, and data for it."""

    model: str
    data: str
    format: str = "parquet"
    options: dict[str, Any] = field(default_factory=dict)
    select: list[str] | None = None
    master: str | None = "local[2]"


@dataclass(frozen=True, kw_only=True)
class Evaluation(SavedModel):
    """The keys of ``sparkdl evaluate``; metrics and loss are those of the run unless given."""

    metrics: list[Spec] | None = None
    loss: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction(SavedModel):
    """The keys of ``sparkdl predict``."""

    output: str
    output_format: str = "parquet"
    column: str = "prediction"


SAVED = {"evaluate": Evaluation, "predict": Prediction}


def new_parser(**arguments: Any) -> ArgumentParser:
    """Return a parser of the library, which imports nothing that a value names."""
    try:
        from jsonargparse import ArgumentParser, set_parsing_settings
    except ImportError:
        raise ParameterError("jobs need jsonargparse: pip install 'sparkdl-torch[jobs]'.") from None
    set_parsing_settings(
        instantiate_subclass_spec_in_any=False,
        import_path_denylist=["*"],
        import_path_allowlist=[__name__],
    )
    return ArgumentParser(exit_on_error=False, allow_abbrev=False, **arguments)


def config_of(namespace: Any) -> Config:
    """Return the configuration of parsed and instantiated arguments."""
    names = [each.name for each in dataclasses.fields(Config)]
    config = Config(**{name: getattr(namespace, name) for name in names})
    _fold(config)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, options=flat(config.data.options)),
        spark=dataclasses.replace(config.spark, settings=flat(config.spark.settings)),
        tune=dataclasses.replace(config.tune, space=flat(config.tune.space)),
    )
    raise_all(
        ParameterError,
        [
            f"{key} was redacted when it was written: give it again, with --{key}=..."
            for key, value in leaves(dataclasses.asdict(config))
            if isinstance(value, str) and REDACTED in value
        ],
    )
    return config


def _fold(value: Any) -> None:
    """Move arguments beside a ``class_path``, as of ``--optimizer.lr 1e-3``, below ``init_args``."""
    inner = vars(value) if dataclasses.is_dataclass(value) else value
    for each in (
        inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
    ):
        _fold(each)
    if isinstance(value, dict) and "class_path" in value:
        beside = {k: value.pop(k) for k in [*value] if k not in ("class_path", "init_args")}
        value["init_args"] = {**(value.get("init_args") or {}), **beside}


def flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """Join nested keys with dots, as in ``spark.executor.memory``, except inside of a component."""
    joined: dict[str, Any] = {}
    for name, value in content.items():
        nested = isinstance(value, Mapping) and "class_path" not in value
        inner = {f"{name}.{k}": v for k, v in flat(value).items()} if nested else {name: value}
        joined |= inner
    return joined


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values below ``value`` that are no mappings, with their dotted keys."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inner in value.items():
        yield from leaves(inner, f"{key}.{name}" if key else str(name))


_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    types.NoneType: "null",
}


def in_words(hint: Any) -> str:
    """Return a type hint as somebody who writes YAML would say it."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(map(in_words, typing.get_args(hint))))
    kind = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    if kind is list and inner and inner[0] in (str, float):
        return f"a list of {_WORDS[inner[0]].removeprefix('a ')}s"
    if dataclasses.is_dataclass(kind):
        return "a mapping"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def keys_of(kind: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type hints of a dataclass and its sections by dotted key."""
    keys: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        keys[prefix + name] = hint
        for option in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(option):
                keys |= keys_of(option, f"{prefix}{name}.")
    return keys


def parser_error(error: Exception, hints: Mapping[str, Any]) -> ParameterError:
    """Return what the parser's ``error`` means, with the nearest of the keys in ``hints``."""
    text = str(error).strip()
    optional = r'Parser key "(\w+)":.*? class_path \S+:\s+(Option \'|Parser key ")(.*?)\n    - '
    if match := re.match(optional, text, re.DOTALL):  # a section that may be null: look inside
        text = f"{match[2]}{match[1]}.{match[3]}"
    if match := re.match(r"unrecognized arguments: (.*)", text, re.DOTALL):
        words = [word.partition("=")[0][2:] for word in match[1].split() if word[:2] == "--"]
        text = " ".join(unknown_key(word, hints) for word in words) or text
    elif match := re.match(r"Group '(.+)' does not accept option '(.+)'", text):
        text = unknown_key(f"{match[1]}.{match[2]}", hints)
    elif match := re.match(r"Option '(.+)' is not accepted", text):
        text = unknown_key(match[1], hints)
    elif match := re.match(r'Parser key "config": File does not exist: (.*)', text):
        text = f"config: there is no file {match[1]}."
    elif match := re.match(r"Parser key \"(.+?)\":(?s:.*)Importing '(.+)' is not allowed", text):
        text = f"{match[1]}: there is no file {match[2]}, and a section is a mapping or a file."
    elif match := re.search(r"(?s)interpolation: \"?(.+?)\"?\n +full_key: (\S+)", text):
        text = f"{match[2]}: {match[1]}."
    elif match := re.match(r'Parser key "(.+?)":\s*(.*)', text, re.DOTALL):
        value = re.search(r"(?:Got|Given) value: (.*)", match[2])
        text = f"{match[1]}: {match[2]}"
        if value and match[1] in hints:
            quote = f" (quote it: '{value[1]}')" if re.fullmatch(r"[\d.]+", value[1]) else ""
            wanted = in_words(hints[match[1]])
            text = f"{match[1]}: give {wanted}, not {value[1]}{quote if 'text' in wanted else ''}."
    elif match := re.match(r"the following arguments are required: (.*)", text):
        whole = "data.train, model, optimizer" in match[1]
        text = f"missing: {match[1]}.{' Give --config FILE.' if whole else ''}"
    elif match := re.match(
        r"Problems parsing config: (?s:.*\n)?(.+)\n +in .*(line \d+, column \d+)", text
    ):
        text = f"config: the file is not valid YAML ({match[2]}: {match[1]})."
    elif match := re.match(r"Unexpected config:", text):
        text = "give a mapping of keys to values."
    return ParameterError(text)


def with_lines(message: str, arguments: Sequence[str]) -> str:
    """Return the message of a mistake with the line of the file that has the key it begins with."""
    overridden = [f"{each[2:].partition('=')[0]}." for each in arguments if each[:2] == "--"]
    places: dict[str, str] = {}
    for before, file in zip(["", *arguments], [*arguments, ""], strict=True):
        if before == "--config" or file.startswith("--config="):
            places |= dict(_places(file.removeprefix("--config=")))

    def placed(line: str) -> str:
        if match := re.match(r'(?:  - )?(?:unknown key ")?([\w.]*\w)(.*)', line):
            name, inside = match[1], re.findall(r"\w+", match[2])
            keys = [*(f"{name}.init_args.{word}" for word in inside), name]
            for key in (*keys, f"trainer.{name}", f"data.{name}"):
                head = key.partition("init_args")[0].rstrip(".") + "."
                if key in places and not any(each.startswith(head) for each in overridden):
                    return f"{line} ({places[key]})"
        return line

    return "\n".join(map(placed, message.split("\n")))


def _places(file: str) -> Iterator[tuple[str, str]]:
    """Yield each dotted key of a YAML file, and its line in words."""
    import yaml

    def below(node: Any, prefix: str) -> Iterator[tuple[str, str]]:
        for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
            yield prefix + str(name.value), f"line {name.start_mark.line + 1} of {file}"
            yield from below(value, f"{prefix}{name.value}.")

    with contextlib.suppress(OSError, yaml.YAMLError), open(file, encoding="utf-8") as text:
        yield from below(yaml.compose(text), "")


def unknown_key(key: str, hints: Mapping[str, Any]) -> str:
    """Return a sentence about an unknown key: the nearest one, in its section or in another."""
    key = next((k for k in _heads(key) if k not in hints), key)
    section, _, name = key.rpartition(".")
    beside = {k.rpartition(".")[2]: k for k in hints if k.rpartition(".")[0] == section}
    others = {k.rpartition(".")[2]: k for k in reversed(list(hints))}  # the first of a name counts
    for names in (beside, others):
        if match := re.search('"(.+)"', nearest(name, names)):
            return f'unknown key "{key}". Did you mean "{names[match[1]]}"?'
    return f'unknown key "{key}". Known here: {", ".join(beside)}.'


def _heads(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file that a job wrote."""
    import yaml

    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def with_file_of_run(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the configuration of the run folder to resume, if none is given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    parser.add_argument("--config")
    known, _ = parser.parse_known_args(arguments)
    if known.config is not None or known.resume is None:
        return list(arguments)
    path = Path(known.resume) / "config.yaml"
    if not path.is_file():
        raise ParameterError(
            f"--resume: {known.resume} is not a run folder (there is no config.yaml in it). Give one "
            "such as runs/digits-20261124-105124; for a checkpoint or latest, give --config FILE too."
        )
    return ["--config", str(path), *arguments]
