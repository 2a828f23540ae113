"""The trainer and the search that a configuration describes, built before any data is read.

A component is a function or class that a file names, with arguments. All mistakes of a configuration
are reported in one error.
"""

from __future__ import annotations

import functools
import inspect
import operator
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sparkdl
from sparkdl.data.columns.base import specs_to_json
from sparkdl.errors import ParameterError, frames_of_user, nearest, raise_all, unknown_argument
from sparkdl.infer.recipe import is_module_builder
from sparkdl.metrics.named import resolve
from sparkdl.usercode.travel import is_library


def find(path: str) -> Any:
    """Return the callable that ``path`` names, and let it travel to the executors."""
    file, in_file, name = path.rpartition(".py:")
    full_name = f"{_module_of(Path(file))}:{name}" if in_file else path
    try:
        target = pkgutil.resolve_name(full_name)
    except Exception as error:
        hint = (
            nearest(error.name or "", dir(error.obj)) if isinstance(error, AttributeError) else ""
        )
        problem = f'"{path}" cannot be imported ({type(error).__name__}: {error}).'
        raise ParameterError(f"{problem}{hint}{place_of(error)}") from error
    if not callable(target):
        raise ParameterError(f'"{path}" is a {type(target).__name__}, which cannot be called.')
    ship(target)
    return target


def _module_of(file: Path) -> str:
    """Return the name by which a file, without its ending, can be imported again from here."""
    whole = file.with_name(f"{file.name}.py").resolve()
    if not whole.is_file():
        raise ParameterError(f"there is no file {whole}.")
    if all(map(str.isidentifier, file.parts)):
        return ".".join(file.parts)
    sys.path.append(str(whole.parent))
    return file.name


def ship(target: Any) -> None:
    """Let a function or class travel by value if its module is not installed."""
    from pyspark import cloudpickle

    module = getattr(target, "__module__", None) or "builtins"
    package = sys.modules.get(module.partition(".")[0])
    if package is not None and package.__name__ != "__main__" and not is_library(module):
        cloudpickle.register_pickle_by_value(package)


def place_of(cause: BaseException | None) -> str:
    """Return the last line of the user's own code that an exception comes from, or ""."""
    lines = [] if cause is None else frames_of_user(cause).splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=None)
    return "" if last is None else "\n" + "\n".join(lines[last : last + 2])


def _is_component(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _parts(spec: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a component."""
    if isinstance(spec, str):
        return spec, {}
    if not _is_component(spec):
        raise ParameterError("give a name, or a mapping with class_path and init_args.")
    beside = {name: it for name, it in spec.items() if name not in ("class_path", "init_args")}
    return spec["class_path"], {**beside, **(spec.get("init_args") or {})}


def bound(spec: Any) -> Callable[..., Any]:
    """Return what a component names, with its arguments bound to it."""
    path, arguments = _parts(spec)
    target = find(path)
    _check(path, target, arguments)
    values = {k: bound(v) if _is_component(v) else v for k, v in arguments.items()}
    return functools.partial(target, **values) if values else target


def made(spec: Any) -> Any:
    """Return what a component makes."""
    make = bound(spec)
    try:
        return make()
    except ParameterError:
        raise
    except Exception as error:
        problem = f"{_parts(spec)[0]} cannot be made ({type(error).__name__}: {error})."
        raise ParameterError(problem + place_of(error)) from error


def instance(spec: Any) -> Callable[..., Any]:
    """Return an instance of a class such as ``torch.nn.CrossEntropyLoss``, or the function."""
    one: Callable[..., Any] = (made if isinstance(find(_parts(spec)[0]), type) else bound)(spec)
    return one


def each(make: Callable[[Any], Any], value: Any, words: bool = False) -> Any:
    """Return what ``make`` makes of a component, or of those in a list or mapping.

    With ``words``, names are such as ``ddp``, and stay.
    """
    if isinstance(value, list):
        return [each(make, one, words) for one in value]
    if isinstance(value, Mapping) and not _is_component(value):
        return {name: each(make, one, words) for name, one in value.items()}
    return value if words and isinstance(value, str) else make(value)


def _check(path: str, target: Any, arguments: Mapping[str, Any]) -> None:
    """Compare arguments with a signature: their names, and the types of plain values."""
    try:
        parameters = inspect.signature(target, eval_str=True).parameters
    except Exception:  # it has none, or names in it are only for type checkers
        return
    open_to_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name, value in arguments.items():
        if name not in parameters and not open_to_any:
            raise ParameterError(unknown_argument(path, name, value, [*parameters]))
        hint = parameters[name].annotation if name in parameters else None
        options = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
        kinds = [_PLAIN.get(option) for option in options]
        if None not in kinds and not any(isinstance(value, kind) for kind in kinds if kind):
            wanted = inspect.formatannotation(hint)
            raise ParameterError(f"{name}: give {wanted}, not {value!r}.")


_UNIONS = (typing.Union, types.UnionType)
_PLAIN: dict[Any, Any] = {kind: kind for kind in (bool, int, str, type(None))}
_PLAIN[float] = (int, float)
"""The types of values for plain annotations."""


def is_torch_loss(spec: Any) -> bool:
    """Return whether this is a loss of ``torch.nn`` without components, which runs no other code."""
    path, arguments = _parts(spec)
    if not path.startswith("torch.nn") or any(map(_is_component, arguments.values())):
        return False
    target = find(path)
    if inspect.isfunction(target):
        return target.__module__ == "torch.nn.functional"
    return isinstance(target, type) and is_module_builder(target)


class _Problems(list[str]):
    """The mistakes so far."""

    def of(self, key: str, make: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``make`` returns, or None and note its mistake under ``key``."""
        try:
            return make(*arguments)
        except ParameterError as error:
            self.append(f"{key}: {error}")
        return None


def trainer_of(config: Mapping[str, Any]) -> sparkdl.Trainer:
    """Return the trainer that ``config`` describes, except for what is known later.

    The validation has no data, checkpoints without a path of their own have a relative one, and the
    schedule is missing.
    """
    problems, fields = _Problems(), dict[str, Any]()
    known = {*inspect.signature(sparkdl.Trainer).parameters} - {"schedule"}
    for section in ("data", "trainer", ""):
        for name, value in (config[section] if section else config).items():
            make = _MAKERS.get(name)
            if make is not None and value is not None:
                value = problems.of(f"{section}.{name}".lstrip("."), make, value)
            fields |= {name: value} if name in known else {}
    problems.of("schedule", schedule_of, config["schedule"], 1)
    stops = [problems.of(key, _trigger, config[key] or {}) for key in ("trainer", "early_stopping")]
    raise_all(ParameterError, problems)
    if stops := [stop for stop in stops if stop is not None]:
        fields["stop"] = functools.reduce(operator.or_, stops)
    trainer = sparkdl.Trainer(**fields)
    problems.of("data.columns", lambda: specs_to_json(trainer.columns))  # as it will be saved
    raise_all(ParameterError, problems)
    return trainer


def _trigger(section: Mapping[str, Any], default: Any = None) -> Any:
    """Return the trigger for when any key of a section that is about time or metrics is due."""
    metric = section.get("metric", "loss")
    kinds: dict[str, Callable[[Any], sparkdl.Trigger]] = {
        "epochs": sparkdl.max_epoch,
        "max_iterations": sparkdl.max_iteration,
        "max_seconds": sparkdl.max_time,
        "min_loss": sparkdl.min_loss,
        "every_epochs": sparkdl.every_epoch,
        "every_iterations": sparkdl.every,
        "every_seconds": sparkdl.every_seconds,
        "patience": lambda it: sparkdl.plateau(metric, it, section["min_delta"]),
        "target": lambda it: sparkdl.max_score(metric, it),
    }
    due = [make(section[key]) for key, make in kinds.items() if section.get(key) is not None]
    return functools.reduce(operator.or_, due) if due else default


def metrics_of(specs: Any) -> Any:
    """Return the metrics: names as they are, and components as the metrics that they make."""
    metrics = each(made, specs, words=True)
    resolve(metrics)
    return metrics


def _validation(section: Mapping[str, Any]) -> sparkdl.Validation:
    share = section["share"]
    if (section["data"] is None) == (share is None):
        raise ParameterError("give either data, a path, or share, a part of the training data.")
    if share is not None and not (isinstance(share, float) and 0 < share < 1):
        raise ParameterError(f"share={share!r}: give a number between 0 and 1, such as 0.1.")
    return sparkdl.Validation(
        None,  # type: ignore[arg-type]  # known later
        metrics=metrics_of(section["metrics"]),
        every=_trigger(section, sparkdl.every_epoch()),
        best=section["best"],
        batch_size=section["batch_size"],
    )


def checkpoint_of(section: Mapping[str, Any], folder: Path = Path()) -> sparkdl.Checkpoint:
    """Return the checkpoints, at their own path or in the run ``folder``."""
    return sparkdl.Checkpoint(
        section["path"] or folder / "checkpoints",
        every=_trigger(section, sparkdl.every_epoch()),
        keep=section["keep"],
    )


def find_model(path: str) -> Path:
    """Return the folder of the model in a run folder; any other path as it is."""
    model = Path(path) / "model"
    return model if (model / "model.json").is_file() else Path(path)


def _weights(path: str) -> str:
    return str(find_model(path) / "model.safetensors") if Path(path).is_dir() else path


_MAKERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model", "augment", "prepare"), bound),
    **dict.fromkeys(("loss", "step", "compression"), instance),
    **dict.fromkeys(("consistency", "sampling"), made),
    **dict.fromkeys(("columns", "callbacks"), functools.partial(each, made)),
    "optimizer": functools.partial(each, bound),
    "strategy": functools.partial(each, made, words=True),
    "buffers": functools.partial(each, bound, words=True),
    "metrics": metrics_of,
    "histograms": sparkdl.every,
    "weights": _weights,
    "validation": _validation,
    "checkpoint": checkpoint_of,
}
"""How a key becomes a field of the trainer; all others are as they stand."""


def schedule_of(spec: Any, iterations: int) -> Any:
    """Return the scheduler's class with its arguments; "iterations" becomes their number."""
    if spec is None:
        return None
    path, arguments = _parts(spec)
    values = {k: iterations if v == "iterations" else v for k, v in arguments.items()}
    return bound({"class_path": path, "init_args": values})


def search_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``sparkdl.tune.search`` except trainer, data and path."""
    problems, space = _Problems(), dict[str, Any]()
    for name, domain in config["tune"]["space"].items():
        key = name.removeprefix("trainer.").removeprefix("data.")
        space[key] = domain
        if not isinstance(domain, list):
            space[key] = problems.of(f"tune.space.{name}", made, domain)
    maker = functools.partial(each, made, words=True)
    algorithm = problems.of("tune.algorithm", maker, config["tune"]["algorithm"])
    raise_all(ParameterError, problems)
    return {**config["tune"], "space": space, "algorithm": algorithm}
