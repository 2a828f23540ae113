"""One step of the optimizers on one slice. Pure torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sparkdl.codec.safe import mapped
from sparkdl.errors import ModelError
from sparkdl.slices.optimizer import OptimizerSpec, take_step
from sparkdl.slices.spec import ARRAY_DTYPES, GROUP, Fragment, SliceSpec, SliceState

SparseRows = tuple[torch.Tensor, torch.Tensor]
"""A sparse gradient of a fragment: row numbers (int64, [k]) and values ([k, width])."""


def step_slice(
    plan: SliceSpec,
    state: SliceState,
    gradient: torch.Tensor,
    absent: frozenset[int],
    optimizer_plan: OptimizerSpec,
    hyperparameters: Sequence[Mapping[str, Any]] | None = None,
    sparse: Mapping[int, SparseRows] | None = None,
    loss: torch.Tensor | None = None,
) -> None:
    """Make one optimizer step on a slice, in place: ``state`` must be the caller's own copy.

    State that an optimizer creates in its first step is added to ``state``. If ``sparse`` is None,
    the gradients of tables are dense, and ``gradient`` has ``plan.trainable_length`` elements; else
    it has ``plan.dense_length``. Parameters in ``absent`` are skipped; a table that is neither
    there nor in ``sparse`` only has no such row in this slice.
    """
    fragments, tensors = _tensors(plan, state)
    places = {n: tensor.data_ptr() for n, tensor in tensors.items()}
    for number, tensor in tensors.items():
        if number not in absent:
            tensor.grad = _gradient(fragments[number], gradient, sparse)
    for optimizer in optimizer_plan.build(tensors, hyperparameters):
        ours = _held_by(optimizer, tensors)
        held, before = _load(ours, optimizer, fragments, state, optimizer_plan, hyperparameters)
        with (
            _missing_told(optimizer),
            torch.sparse.check_sparse_tensor_invariants(False),  # else Adagrad's step warns
        ):
            if wants_loss(type(optimizer)):  # type: ignore[arg-type]
                take_step(optimizer, evaluate_once(loss, type(optimizer).__name__))
            else:
                take_step(optimizer)
        counted = {id(g): _changed(g, before[id(g)]) for g in optimizer.param_groups}
        for tensor, number, group in ours:
            if made := optimizer.state.get(tensor):
                _check_plain(optimizer, made)
                _keep(state, plan, fragments[number], made, held.get(number, {}))
            if changed := counted[id(group)]:
                state.held.setdefault(number, ())
                state.others[number] = {**state.others.get(number, {}), **changed}
    for number, tensor in tensors.items():
        tensor.grad = None
        if tensor.data_ptr() != places[number]:  # replaced instead of written in place
            _view(state.weights, fragments[number]).copy_(tensor)


def evaluated_weights(
    plan: SliceSpec,
    state: SliceState,
    optimizer_plan: OptimizerSpec,
    hyperparameters: Sequence[Mapping[str, Any]] | None = None,
) -> torch.Tensor:
    """Return a slice's weights as ``eval()`` of the optimizers leaves them; ``state`` stays."""
    names = {name for held in state.held.values() for name in held}
    copied = SliceState(
        state.weights.clone(),
        {name: state.arrays[name].clone() for name in names},
        state.held,
        mapped(state.others, torch.Tensor, torch.clone),
    )
    fragments, tensors = _tensors(plan, copied)
    for optimizer in optimizer_plan.build(tensors, hyperparameters):
        ours = _held_by(optimizer, tensors)
        _load(ours, optimizer, fragments, copied, optimizer_plan, hyperparameters)
        if callable(evaluate := getattr(optimizer, "eval", None)):
            evaluate()
    for number, tensor in tensors.items():
        _view(copied.weights, fragments[number]).copy_(tensor)
    return copied.weights


def _tensors(
    plan: SliceSpec, state: SliceState
) -> tuple[dict[int, Fragment], dict[int, torch.Tensor]]:
    """Return the fragments of parameters that have elements, and their weights, by number."""
    fragments = {p.number: p for p in plan.parameters if p.length}
    return fragments, {n: _view(state.weights, p) for n, p in fragments.items()}


def _load(
    ours: Sequence[tuple[torch.Tensor, int, dict[str, Any]]],
    optimizer: torch.optim.Optimizer,
    fragments: Mapping[int, Fragment],
    state: SliceState,
    optimizer_plan: OptimizerSpec,
    hyperparameters: Sequence[Mapping[str, Any]] | None,
) -> tuple[dict[int, dict[str, torch.Tensor]], dict[int, dict[str, Any]]]:
    """Give an optimizer the state of an earlier step.

    Return the views of arrays that each parameter has, and by the id of each group those of its
    numbers that no earlier step has changed.
    """
    held: dict[int, dict[str, torch.Tensor]] = {}
    changed: dict[int, set[str]] = {}
    for tensor, number, group in ours:
        if number not in state.others:
            continue
        arrays = {name: _view(state.arrays[name], fragments[number]) for name in state.held[number]}
        kept = state.others[number]
        others = {name: value for name, value in kept.items() if not name.startswith(GROUP)}
        if arrays or others:
            optimizer.state[tensor] = {**arrays, **_where_stepped(group, tensor, others)}
            held[number] = arrays
        if len(others) < len(kept) and id(group) not in changed:
            each = zip(optimizer_plan.members, hyperparameters or (), strict=False)
            scheduled = next((values for members, values in each if number in members), {})
            names = {name.removeprefix(GROUP) for name in kept if name not in others}
            group.update({name: kept[GROUP + name] for name in names - scheduled.keys()})
            changed[id(group)] = names
    return held, {
        id(group): {k: v for k, v in _numbers(group).items() if k not in changed.get(id(group), ())}
        for group in optimizer.param_groups
    }


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the numbers and tensors in a parameter group."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if isinstance(value, int | float | torch.Tensor)
    }


def _changed(group: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group that a step has changed, by their names in ``others``."""
    return {
        GROUP + name: value
        for name, value in _numbers(group).items()
        if name not in before or not _equal(value, before[name])
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other)


@contextlib.contextmanager
def _missing_told(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Raise ModelError for an entry that the block misses in the state of an earlier step."""
    given = {name for state in optimizer.state.values() for name in state}
    try:
        yield
    except KeyError as error:
        (name,) = error.args or (None,)
        if not given or not isinstance(name, str) or name in given:
            raise
        raise ModelError(
            f'optimizer {type(optimizer).__name__} misses "{name}" in its state, which was made with '
            "other hyperparameters: train with those of the run that this one continues, or take "
            "its weights alone, with fit(data, start=model, optimizer_state=False)."
        ) from error


def _view(flat: torch.Tensor, fragment: Fragment) -> torch.Tensor:
    """Return the fragment of ``flat`` in the fragment's shape, or one-dimensional if it has none."""
    part = flat[fragment.start : fragment.stop]
    return part.view(fragment.shape) if fragment.shape else part


def _gradient(
    fragment: Fragment, gradient: torch.Tensor, sparse: Mapping[int, SparseRows] | None
) -> torch.Tensor:
    if not fragment.sparse or sparse is None:
        return _view(gradient, fragment)
    if fragment.number in sparse:
        rows, values = sparse[fragment.number]
    else:
        rows = torch.empty(0, dtype=torch.int64)
        values = torch.empty(0, fragment.shape[1], dtype=gradient.dtype)
    # set explicitly, else torch warns; the rows come from the engine and are valid
    found = torch.sparse_coo_tensor(rows[None], values, fragment.shape, check_invariants=False)
    return found.coalesce()


def _held_by(
    optimizer: torch.optim.Optimizer, tensors: Mapping[int, torch.Tensor]
) -> list[tuple[torch.Tensor, int, dict[str, Any]]]:
    """Return the optimizer's parameters with their numbers and groups."""
    numbers = {id(tensor): number for number, tensor in tensors.items()}
    return [(p, numbers[id(p)], group) for group in optimizer.param_groups for p in group["params"]]


def _where_stepped(
    group: Mapping[str, Any], parameter: torch.Tensor, others: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return ``others`` on the device where a step needs them, as torch's ``load_state_dict`` does.

    That is the parameter's device; but step counts stay on the CPU unless the kernel itself counts.
    """
    home = parameter.device
    if home.type == "cpu":
        return others
    counts = group.get("fused") or group.get("capturable")
    return {
        name: value
        if name == "step" and not counts
        else mapped(value, torch.Tensor, lambda tensor: tensor.to(home))
        for name, value in others.items()
    }


@functools.cache
def wants_loss(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer's ``step`` requires a closure that evaluates the loss."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def evaluate_once(loss: torch.Tensor | None, name: str) -> Callable[[], Any]:
    """Return the closure for an optimizer that evaluates the loss, once; None becomes NaN."""
    evaluations = 0

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        if evaluations > 1:
            raise ModelError(
                f"optimizer {name} evaluates the loss more than once in a step, but an iteration "
                "is a single pass over a batch. Make each step evaluate it once: for LBFGS, "
                "partial(torch.optim.LBFGS, max_iter=1) without line_search_fn."
            )
        return torch.tensor(float("nan")) if loss is None else loss

    return closure


def _check_plain(optimizer: torch.optim.Optimizer, made: Mapping[str, Any]) -> None:
    """Raise ModelError for state in a tensor of another class, which is more than its values."""
    for name, value in made.items():
        if isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
            raise ModelError(
                f'optimizer {type(optimizer).__name__} keeps "{name}" of its state in a tensor of the '
                f"class {type(value).__name__}, of which slices and checkpoints would keep the values "
                "alone: use an optimizer whose state is plain tensors, such as torch.optim.AdamW."
            )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _keep(
    state: SliceState,
    plan: SliceSpec,
    fragment: Fragment,
    made: Mapping[str, Any],
    own: Mapping[str, torch.Tensor],
) -> None:
    """Sort an optimizer's state for one fragment into element-wise arrays and others.

    ``own`` are the views of arrays that the optimizer was given.
    """
    held, others = [], {}
    shape = fragment.shape or (fragment.length,)
    for name, value in made.items():
        if name in own and value is own[name]:  # the optimizer wrote in place
            held.append(name)
            continue
        array = state.arrays.get(name)
        if (
            not isinstance(value, torch.Tensor)
            or tuple(value.shape) != shape
            or value.dtype not in ARRAY_DTYPES
            or (array is not None and array.dtype != value.dtype)
        ):
            others[name] = value
            continue
        if array is None:
            home = state.weights.device
            array = torch.zeros(plan.trainable_length, dtype=value.dtype, device=home)
            state.arrays[name] = array
        dense = value.to_dense() if value.is_sparse else value
        place = _view(array, fragment)
        if place.data_ptr() != dense.data_ptr():
            place.copy_(dense)
        held.append(name)
    state.held[fragment.number], state.others[fragment.number] = tuple(held), others
