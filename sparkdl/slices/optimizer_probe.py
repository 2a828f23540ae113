"""Find out how the tensors of an optimizer may be cut.

There are three kinds of optimizers. One that treats every element by itself works on any cut; one
that uses a whole tensor (its norm, its rows) works on slices cut between tensors; one that uses all
tensors together works on one slice only. The kinds of torch's classes are in a table. Others are
tried: on a few numbers of several scales, for some steps, and on tensors of the shapes that the
model has, because some treat tensors with few elements in another way, or work by blocks of
elements (8-bit Adam does both). A class for which a trial is not conclusive declares its kind in
the attribute ``update_depends_on``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.errors import ModelError, in_short
from sparkdl.model.flat import sparse_tables
from sparkdl.process.determinism import seeded, torch_threads
from sparkdl.slices.optimizer import KINDS, GroupSpec, OptimizerSpec, declared, take_step
from sparkdl.slices.optimizer_step import evaluate_once, step_slice, wants_loss
from sparkdl.slices.spec import Fragment, SliceSpec, SliceState

SEVERAL = (
    "Give parameters that need another one their own, by name or pattern: "
    'optimizer={"encoder": torch.optim.Muon, "embedding": torch.optim.SparseAdam, "": '
    "torch.optim.AdamW}."
)
"""The advice for a user whose optimizer does not accept every parameter."""

_BY_ELEMENT = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"),
    *("Rprop", "ASGD", "SparseAdam"),
)
_OF_TORCH = {
    getattr(torch.optim, name, None): kind
    for kind, names in [
        ("element", _BY_ELEMENT),
        ("tensor", ("Adafactor", "Muon")),
        ("all", ("LBFGS",)),
    ]
    for name in names
}
"""The kinds of torch's classes."""


@dataclass(frozen=True)
class _Trial:
    """The scale of the weights and of the gradients of a trial, and its number of steps."""

    weights: float = 1.0
    gradients: float = 1.0
    steps: int = 3


_FIRST = _Trial()
_TRIALS = (
    _FIRST,
    _Trial(gradients=1e-4),
    _Trial(gradients=1e4),
    _Trial(gradients=1e8),
    _Trial(weights=1e4),
    _Trial(steps=60),
)
"""Trials that expose optimizers which use other elements only beyond some norm or after a few
steps."""
_AT_SIZE = _Trial(steps=2)
_STEPS_OF_A_LIFE = 12
_ELEMENTS, _FEWEST = 1 << 21, 1 << 13
"""The number of elements of all trials of a model's shapes, and what each may have at least."""
_LEARNING_RATE = 0.1
"""The learning rate of trials if the optimizer's is 0 at first."""
_TABLE = (6, 4)
Span = tuple[int, int, int]
"""A tensor number, and the first and the last + 1 element, counted over all tensors in sequence."""
_TOGETHER: list[list[Span]] = [[(0, 0, 24), (1, 24, 48)]]
_APART: list[list[Span]] = [[(0, 0, 24)], [(1, 24, 48)]]
_CUT: list[list[Span]] = [[(0, 0, 8)], [(0, 8, 24), (1, 24, 36)], [(1, 36, 48)]]


def probe_cut_rule(
    plan: OptimizerSpec, parameters: Sequence[torch.nn.Parameter], module: torch.nn.Module
) -> OptimizerSpec:
    """Return ``plan`` with the rule for cutting its slices, after a trial of the optimizers."""
    number = {id(p): i for i, p in enumerate(parameters)}
    tables = {number[key] for key in sparse_tables(module) if key in number}
    shapes = [None if i in tables else tuple(p.shape) for i, p in enumerate(parameters)]
    kinds = [kind for part in plan.parts for kind in _kinds_of(part, shapes)]
    return replace(
        plan, elementwise=all(kind == "element" for kind in kinds), separate="all" not in kinds
    )


def _kinds_of(part: GroupSpec, shapes: Sequence[tuple[int, ...] | None]) -> list[str]:
    """Return one kind for each group that has parameters, since it may depend on hyperparameters."""
    return [
        _kind(
            OptimizerSpec(
                parts=(replace(part, groups=(group,), members=((0, 1),), dimensions=(ndim,)),)
            ),
            {shape for n in members if (shape := shapes[n]) is not None},
            any(shapes[n] is None for n in members),
            part.kind,
        )
        for group, members, ndim in zip(part.groups, part.members, part.dimensions, strict=True)
        if members
    ]


# One thread: most tensors are tiny, and on busy cores a second thread would only add waiting.
@torch_threads(1)
def _kind(
    plan: OptimizerSpec,
    shapes: Collection[tuple[int, ...]],
    tables: bool,
    made: type[torch.optim.Optimizer],
) -> str:
    """Return the kind of an optimizer with one group, whose parameters are numbers 0 and 1.

    ``shapes`` are those of its dense parameters, and ``tables`` says that it has sparse ones too.
    """
    known = declared(made) or _OF_TORCH.get(made)
    kinds = []
    for ndim, sparse in [
        *((n, False) for n in sorted({max(1, len(s)) for s in shapes})),
        (2, True),
    ]:
        if sparse and not tables:
            break
        shape = (24,) if ndim == 1 else (*_TABLE, *([1] * (ndim - 2)))
        try:
            _update(plan, shape, _TOGETHER, sparse)
            if not sparse and made not in _OF_TORCH:
                _check_memory(plan, shape)
        except ModelError:
            raise
        except Exception as error:
            if sparse:
                raise ModelError(
                    f"optimizer {plan.name} does not take the sparse gradients of an embedding with "
                    f"sparse=True ({in_short(error)}). Give the embedding another optimizer by its "
                    'name, optimizer={"embedding": torch.optim.SparseAdam, "": torch.optim.Adam}, or '
                    "build it with sparse=False."
                ) from error
            raise ModelError(
                f"optimizer {plan.name} fails on a parameter of {ndim} dimension"
                f"{'s' if ndim > 1 else ''} with a dense gradient ({in_short(error)}). {SEVERAL}"
            ) from error
        if known is None:
            kinds += [_seen(plan, shape, sparse, trial) for trial in _TRIALS]
    if known is not None:
        return known
    if all(kind == "element" for kind in kinds):
        kinds += [_at_size(plan, shape) for shape in _shrunk(shapes)]
    return max(kinds, key=KINDS.index, default="element")


def _same(one: torch.Tensor, other: torch.Tensor, scale: float = 1.0) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-14 * scale, equal_nan=True)


def _seen(plan: OptimizerSpec, shape: tuple[int, ...], sparse: bool, trial: _Trial) -> str:
    """Return the kind that one trial shows; "element" if the trial fails even without a cut."""
    try:
        together = _update(plan, shape, _TOGETHER, sparse, trial)
    except Exception:
        return "element"
    try:
        apart = _update(plan, shape, _APART, sparse, trial)
    except Exception:  # it needs all tensors
        return "all"
    if not _same(together, apart, trial.weights):
        return "all"
    try:
        cut = _update(plan, shape, _CUT, sparse, trial)
    except Exception:  # it needs a matrix, for example
        return "tensor"
    return "element" if _same(cut, apart, trial.weights) else "tensor"


def _shrunk(shapes: Collection[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return shapes of tensors that slices may cut, with fewer rows where that many elements would
    take long."""
    limit, found = max(_FEWEST, _ELEMENTS // max(1, len(shapes))), set()
    for shape in shapes:
        sizes = list(shape)
        for i, rows in enumerate(sizes):
            if (size := math.prod(sizes)) > limit:
                sizes[i] = max(1, limit // (size // rows))
        if math.prod(sizes) >= 64:
            found.add(tuple(sizes))
    return found


def _at_size(plan: OptimizerSpec, shape: tuple[int, ...]) -> str:
    """Return the kind that a tensor of this shape shows if it is cut as slices may cut it: into few
    elements, and at odd multiples of 64 bytes."""
    size = math.prod(shape)
    middle = size // 64 * 32 + 16
    cuts: list[list[Span]] = [[(0, 0, 16)], [(0, 16, middle)], [(0, middle, size)]]
    try:
        whole = _update(plan, shape, [[(0, 0, size)]], trial=_AT_SIZE)
        same = _same(_update(plan, shape, cuts, trial=_AT_SIZE), whole)
    except ModelError:
        raise
    except Exception:  # it may have a kernel for a GPU alone
        same = False
    return "element" if same else "tensor"


def _check_memory(plan: OptimizerSpec, shape: tuple[int, ...]) -> None:
    """Raise ModelError if the optimizer keeps anything outside ``state`` and the numbers in its
    groups from step to step, because in training each step is made by another instance."""
    with seeded(0):
        ours = _update(plan, shape, _TOGETHER, trial=_Trial(steps=_STEPS_OF_A_LIFE))
    with seeded(0):
        drawn = _drawn(_STEPS_OF_A_LIFE, 48)
        tensors = {n: drawn[0, n * 24 : (n + 1) * 24].view(shape).clone() for n in (0, 1)}
        (optimizer,) = plan.build(tensors, _hyperparameters(plan))
        for gradients in drawn[1:]:
            for n, tensor in tensors.items():
                tensor.grad = gradients[n * 24 : (n + 1) * 24].view(shape).clone()
            if wants_loss(type(optimizer)):  # type: ignore[arg-type]
                take_step(optimizer, _at_the_same_weights(plan, tensors))
            else:
                take_step(optimizer)
    # collected again, because the optimizer may have replaced their memory
    living = torch.cat([tensors[n].reshape(-1) for n in (0, 1)])
    if not _same(ours, living - drawn[0]):
        raise ModelError(
            f"optimizer {plan.name} keeps values from step to step outside its state, but the next "
            "step may run on another executor, which gets only the state. Keep them in "
            "self.state[parameter], as torch.optim does, or as numbers in param_groups."
        )


def _at_the_same_weights(
    plan: OptimizerSpec, tensors: Mapping[int, torch.Tensor]
) -> Callable[[], Any]:
    """Return a closure that raises ModelError if the weights are not those of now."""
    before = {n: tensor.clone() for n, tensor in tensors.items()}
    evaluate = evaluate_once(torch.tensor(1.0).double(), plan.name)

    def closure() -> Any:
        if any(not torch.equal(tensor, before[n]) for n, tensor in tensors.items()):
            raise ModelError(
                f"optimizer {plan.name} moves the weights before it evaluates the loss, but an "
                "iteration is a single pass, at the weights with which it begins: use an optimizer "
                "whose step takes no closure, such as torch.optim.AdamW."
            )
        return evaluate()

    return closure


def _hyperparameters(plan: OptimizerSpec) -> list[Mapping[str, Any]]:
    """Return what the trial changes in the group: the learning rate, if it is 0."""
    (group,) = plan.groups
    rate = group.get("lr")
    if not isinstance(rate, int | float | torch.Tensor) or float(rate) != 0:
        return [{}]
    other = torch.full_like(rate, _LEARNING_RATE) if isinstance(rate, torch.Tensor) else None
    return [{"lr": _LEARNING_RATE if other is None else other}]


def _drawn(steps: int, elements: int) -> torch.Tensor:
    """Draw weights, and their gradients for each step, in float64, so that a small learning rate
    hides no difference."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(steps + 1, elements, generator=generator, dtype=torch.float64)


def _update(
    plan: OptimizerSpec,
    shape: tuple[int, ...],
    cuts: list[list[Span]],
    sparse: bool = False,
    trial: _Trial = _FIRST,
) -> torch.Tensor:
    """Return the change of the weights of tensors of one shape after a few steps on slices with the
    fragments ``cuts``."""
    drawn, updates = _drawn(trial.steps, cuts[-1][-1][2]), []
    drawn[0] *= trial.weights
    drawn[1:] *= trial.gradients
    values = _hyperparameters(plan)
    for index, spans in enumerate(cuts):
        start, stop = spans[0][1], spans[-1][2]
        fragments = tuple(_fragment(number, shape, a, b, start, sparse) for number, a, b in spans)
        piece_plan = SliceSpec(index, start, stop, fragments)
        state = SliceState(drawn[0, start:stop].clone())
        for step, gradients in enumerate(drawn[1:]):
            dense = gradients[start:stop].clone()
            rows = {p.number: _rows(p, dense, step) for p in fragments} if sparse else None
            loss = torch.tensor(1.0).double()
            step_slice(piece_plan, state, dense, frozenset(), plan, values, rows, loss)
        updates.append(state.weights - drawn[0, start:stop])
    return torch.cat(updates)


def _fragment(
    number: int, shape: tuple[int, ...], low: int, high: int, start: int, sparse: bool
) -> Fragment:
    size, width = math.prod(shape), shape[-1]
    row = low % size // width
    if sparse:
        shape = ((high - low) // width, width)
    elif high - low < size:
        shape = ()
    return Fragment(number, "parameter", low - start, high - low, shape, sparse, row)


def _rows(fragment: Fragment, dense: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows with a gradient: every third row of the tensor has none."""
    rows = torch.tensor(
        [r for r in range(fragment.shape[0]) if (r + fragment.first_row + step) % 3]
    )
    return rows.long(), dense[fragment.start : fragment.stop].view(fragment.shape)[rows.long()]
