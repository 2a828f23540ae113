"""Checks of the arguments of a parameter server. Each check returns the problems that it finds."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collectives.arguments import name_of
from sparkdl.collectives.key_range import KeySpec, MakeOptimizer
from sparkdl.collectives.server_messages import ServerOptions, first_line
from sparkdl.errors import ParameterError, kind_of, nearest, raise_all, shown, wrong_argument
from sparkdl.plain import plain

CONSISTENCIES = ("asynchronous", "synchronous")


def checked(
    make: Any,
    consistency: Any,
    staleness: Any,
    owners: Iterable[int] | None,
    average: bool,
    timeout: Any,
    replay: Any,
) -> tuple[list[int], ServerOptions]:
    """Check the arguments of the constructor; return the owners' ranks and the options."""
    if not dist.is_initialized():
        raise ParameterError(
            "There is no process group: make a ParameterServer in a function that "
            "sparkdl.gang.run runs on every rank."
        )
    size = dist.get_world_size()
    problems = []
    if consistency not in CONSISTENCIES:
        known = " or ".join(f'"{word}"' for word in CONSISTENCIES)
        close = nearest(consistency, CONSISTENCIES) if isinstance(consistency, str) else ""
        problems.append(f"consistency = {shown(consistency)}: give {known}.{close}")
    if staleness is not None and not _whole(staleness):
        problems.append(
            f"staleness = {shown(staleness)}: give a whole number of at least 0, or None."
        )
    ranks = list(range(size)) if owners is None else _ranks(owners, size)
    if not ranks or len(set(ranks)) < len(ranks):
        problems.append(
            f"owners = {shown(owners)}: give a list of different ranks from 0 to {size - 1}."
        )
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not (number and 0 < timeout < math.inf):
        problems.append(f"timeout = {shown(timeout)}: give a number of seconds above 0.")
    if not isinstance(average, bool):
        problems.append(f"average = {shown(average)}: give True or False.")
    order = None if replay is None else _ranks(replay)
    if replay is not None and not order:
        problems.append(f"replay is {kind_of(replay)}: give the order of a closed server.")
    elif order and max(order) >= size:
        problems.append(
            f"replay: the order is that of {max(order) + 1} ranks, and here are {size}. Run as many."
        )
    raise_all(ParameterError, problems + optimizer(make, len(ranks)))
    synchronous = consistency == "synchronous"
    return ranks, ServerOptions(
        synchronous=synchronous,
        staleness=0 if synchronous and staleness is None else staleness,
        average=average,
        timeout=timeout,
        replay=order,
    )


def _ranks(given: Any, size: int = sys.maxsize) -> list[int]:
    """Return ranks below ``size`` as a list, which is empty if they are none."""
    found = plain(given)
    found = list(found) if isinstance(found, Iterable) else [None]
    return found if all(_whole(rank) and rank < size for rank in found) else []


def optimizer(make: Any, places: int) -> list[str]:
    """Return the problem of an optimizer that cannot be made, or not for rows of a tensor."""
    if make is None:
        return []
    generator = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(4, 2, generator=generator) for _ in range(2))
    try:
        name = type(make([value.clone()])).__name__
        whole = _tried(make, value, gradient)
        parts = [_tried(make, value[rows], gradient[rows]) for rows in (slice(2), slice(2, 4))]
    except Exception as error:
        if problem := wrong_argument(error):
            return [f"optimizer: {problem}"]
        return [
            f"optimizer = {shown(make)}: give a torch.optim class or a partial of one, such as "
            "partial(torch.optim.SGD, lr=0.1), whose step takes no closure. With a list of tensors "
            f"it raises {type(error).__name__}: {first_line(error)}"
        ]
    if places > 1 and not torch.allclose(whole, torch.cat(parts), rtol=1e-4, atol=1e-6):
        return [
            f"optimizer: {name} looks at whole tensors, and {places} owners have some rows each. "
            "Use one owner, such as owners=[0]."
        ]
    return []


def sparse(make: MakeOptimizer | None, spec: KeySpec) -> list[str]:
    """Return the problem of an optimizer that takes no sparse gradients."""
    if make is None:
        return []
    value = torch.zeros(2, *spec.row_shape, dtype=spec.dtype)
    try:
        _step(make, value, _sparse(torch.ones_like(value)))
    except Exception as error:
        return [
            f"push_rows: the optimizer takes no gradient of some rows ({first_line(error)}). Use "
            "torch.optim.SGD, Adagrad or SparseAdam, or push the whole gradient."
        ]
    return []


def _tried(make: MakeOptimizer, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the value after two steps, with sparse gradients if the optimizer takes no others."""
    found = value.clone()
    try:
        return _step(make, found, gradient)
    except RuntimeError:
        return _step(make, found, _sparse(gradient))


def _step(make: MakeOptimizer, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    made = make([value])
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"it returned {kind_of(made)}")
    for _ in range(2):
        value.grad = gradient.clone()
        made.step()
    return value


def _sparse(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_sparse(1).coalesce()


def as_lists(key: Any, value: Any) -> tuple[list[Hashable], list[Any]]:
    """Return the keys and values of a call that takes one or a list."""
    if any(not isinstance(name, Hashable) for name in (key if isinstance(key, list) else [key])):
        raise ParameterError(
            f"key = {shown(key)}: give a str, an int or a tuple, or a list of these."
        )
    if not isinstance(key, list):
        return [key], [value]
    if len({*key}) < len(key):
        raise ParameterError(f"{key}: name every key once.")
    if value is None:
        return key, []
    if not isinstance(value, (list, tuple)) or len(value) != len(key):
        found = len(value) if isinstance(value, (list, tuple)) else kind_of(value)
        raise ParameterError(
            f"There are {len(key)} keys: give a list of as many tensors, not {found}."
        )
    return key, list(value)


def new_keys(
    names: Sequence[Hashable],
    values: Sequence[Any],
    known: Collection[Hashable],
    make: MakeOptimizer | None,
    means: bool,
) -> list[str]:
    """Return the problems of keys that exist already, and of values that are no tensors of use."""
    problems = [f"The key {name!r} exists already." for name in names if name in known]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor):
            problems.append(f"The value of {name!r} is {kind_of(value)}: give a tensor.")
        elif value.layout != torch.strided:
            problems.append(f"The value of {name!r} is {value.layout}: make it dense first.")
        elif not value.is_floating_point():
            kind = f"The value of {name!r} is {name_of(value.dtype)}"
            if means:
                problems.append(f"{kind}, and a mean needs floating-point: use average=False.")
            if make is not None and not _takes(make, value.dtype):
                problems.append(f"{kind}, which the optimizer cannot update: use optimizer=None.")
    return problems


def _takes(make: MakeOptimizer, dtype: torch.dtype) -> bool:
    """Return whether an optimizer can make a step on a tensor of this dtype."""
    try:
        _step(make, torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype))
    except Exception:
        return False
    return True


def gradients(specs: Sequence[KeySpec], values: Sequence[Any]) -> list[str]:
    """Return the problems of tensors that do not fit their keys."""
    problems = []
    for spec, value in zip(specs, values, strict=True):
        if not isinstance(value, torch.Tensor):
            problems.append(f"{spec.name!r}: give a tensor, not {kind_of(value)}.")
        elif value.layout != torch.strided:
            problems.append(f"{spec.name!r}: the tensor is {value.layout}: use push_rows for rows.")
        else:
            problems += _fit(spec, spec.shape, value)
    return problems


def rows(spec: KeySpec, numbers: torch.Tensor) -> list[str]:
    """Return the problems of numbers that are no rows of a key."""
    if not spec.shape:
        return [f"{spec.name!r} has no dimensions, so it has no rows: push and pull it whole."]
    if numbers.dim() != 1 or numbers.dtype != torch.int64:
        found = f"{name_of(numbers.dtype)} {list(numbers.shape)}"
        return [f"{spec.name!r}: the rows are {found}: give their numbers as int64, (n,)."]
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < spec.rows:
        wrong = int(numbers.min() if numbers.min() < 0 else numbers.max())
        return [f"{spec.name!r} has no row {wrong}: its rows are 0 to {spec.rows - 1}."]
    return []


def row_values(spec: KeySpec, numbers: torch.Tensor, values: torch.Tensor) -> list[str]:
    """Return the problem of values that do not fit some rows of a key."""
    return _fit(spec, (len(numbers), *spec.row_shape), values) if numbers.dim() == 1 else []


def _fit(spec: KeySpec, shape: Sequence[int], value: torch.Tensor) -> list[str]:
    wanted = f"{name_of(spec.dtype)} {list(shape)}"
    found = f"{name_of(value.dtype)} {list(value.shape)}"
    return [] if found == wanted else [f"{spec.name!r} needs {wanted}, not {found}."]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
