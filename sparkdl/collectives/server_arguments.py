"""Checks of the arguments of a parameter server. Each check returns the problems that it finds."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sparkdl.collectives.arguments import name_of
from sparkdl.collectives.key_range import KeySpec, MakeOptimizer
from sparkdl.errors import ParameterError, kind_of, nearest, raise_all
from sparkdl.plain import plain

CONSISTENCIES = ("asynchronous", "synchronous")
WHOLE_TENSORS = ("Adafactor", "Muon")
"""Optimizers of torch whose update of a row depends on other rows."""


def checked(
    make: Any,
    consistency: Any,
    staleness: Any,
    owners: Iterable[int] | None,
    timeout: Any,
    replay: Any,
) -> tuple[int, list[int], list[int] | None]:
    """Check the arguments of the constructor.

    Returns:
        The number of ranks, the ranks of the owners, and the order to replay.

    Raises:
        ParameterError: An argument is wrong, or there is no process group.
    """
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
        problems.append(f"consistency = {consistency!r}: give {known}.{close}")
    if staleness is not None and not _whole(staleness):
        problems.append(f"staleness = {staleness!r}: give a whole number of at least 0, or None.")
    ranks = list(range(size)) if owners is None else list(plain(owners))
    if not ranks or len(set(ranks)) < len(ranks) or not all(_whole(r) and r < size for r in ranks):
        problems.append(f"owners = {ranks}: give different ranks from 0 to {size - 1}.")
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not (number and 0 < timeout < math.inf):
        problems.append(f"timeout = {timeout!r}: give a number of seconds above 0.")
    order = None if replay is None else [int(rank) for rank in plain(replay)]
    if order is not None and not all(0 <= rank < size for rank in order):
        problems.append(
            f"replay: the order is that of {max(order) + 1} ranks, and here are {size}. Run as many."
        )
    raise_all(ParameterError, problems + optimizer(make, len(ranks)))
    return size, ranks, order


def optimizer(make: Any, places: int) -> list[str]:
    """Return the problem of an optimizer that cannot be made, or not for rows of a tensor."""
    if make is None:
        return []
    try:
        made = make([torch.zeros(2, 2)])
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"it returned {kind_of(made)}")
    except Exception as error:
        return [
            f"optimizer = {make!r}: give a torch.optim class or a partial of one, such as "
            f"partial(torch.optim.SGD, lr=0.1). With a list of tensors it raises "
            f"{type(error).__name__}: {error}"
        ]
    name = type(made).__name__
    depends = getattr(made, "update_depends_on", "element")
    if name == "LBFGS" or depends == "all":
        return [f"optimizer: {name} needs all tensors together, and keys are updated one by one."]
    if places > 1 and (depends == "tensor" or name in WHOLE_TENSORS):
        return [
            f"optimizer: {name} looks at whole tensors, and {places} owners have some rows each. "
            "Use one owner, such as owners=[0]."
        ]
    return []


def sparse(make: MakeOptimizer | None, spec: KeySpec) -> list[str]:
    """Return the problem of an optimizer that takes no sparse gradients."""
    if make is None:
        return []
    tensor = torch.zeros(2, *spec.row_shape, dtype=spec.dtype)
    optimizer = make([tensor])
    values = torch.ones(1, *spec.row_shape, dtype=spec.dtype)
    tensor.grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), values, tensor.shape, check_invariants=False
    )
    try:
        optimizer.step()
    except Exception as error:
        return [
            f"push_rows: {type(optimizer).__name__} takes no gradient of some rows "
            f"({str(error).partition(chr(10))[0][:120]}). Use torch.optim.SparseAdam, SGD without "
            "momentum or Adagrad, or push the whole gradient."
        ]
    return []


def as_lists(key: Any, value: Any) -> tuple[list[Hashable], list[Any]]:
    """Return the keys and values of a call that takes one or a list.

    Raises:
        ParameterError: There are not as many of both, or a key stands twice.
    """
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
    names: Sequence[Hashable], values: Sequence[Any], known: Collection[Hashable]
) -> list[str]:
    """Return the problems of keys that exist already, or of values that are no dense tensors."""
    problems = [f"The key {name!r} exists already." for name in names if name in known]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor):
            problems.append(f"The value of {name!r} is {kind_of(value)}: give a tensor.")
        elif value.layout != torch.strided:
            problems.append(f"The value of {name!r} is {value.layout}: make it dense first.")
    return problems


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
