"""Find out by trial how the tensors of an optimizer may be cut.

There are three kinds of optimizers. One that treats every element by itself works on any cut; one
that uses a whole tensor (its norm, its rows) works on slices cut between tensors; one that uses all
tensors together works on one slice only. A class for which a short trial is not conclusive, such as
one that uses other elements only after many steps, declares its kind in the attribute
``update_depends_on``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparkdl.errors import ModelError
from sparkdl.model.layout import sparse_tables
from sparkdl.process.determinism import seeded, torch_threads
from sparkdl.slices.optimizer import CutRule, GroupSpec, OptimizerSpec, declared
from sparkdl.slices.optimizer_step import evaluate_once, step_slice, wants_loss
from sparkdl.slices.spec import Fragment, SliceSpec
from sparkdl.slices.state import SliceState

SEVERAL = (
    "Give parameters that need another one their own, by name or pattern: "
    'optimizer={"encoder": torch.optim.Muon, "embedding": torch.optim.SparseAdam, "": '
    "torch.optim.AdamW}."
)
"""The advice for a user whose optimizer does not accept every parameter."""

_SIZE, _WIDTH = 24, 4
_STEPS_OF_A_LIFE = 12


@dataclass(frozen=True)
class _Trial:
    """The scale of the weights and of the gradients of a trial, and its number of steps."""

    weights: float = 1.0
    gradients: float = 1.0
    steps: int = 3


_FIRST = _Trial()
_FURTHER = (
    _Trial(gradients=1e-4),
    _Trial(gradients=1e4),
    _Trial(gradients=1e8),
    _Trial(weights=1e4),
    _Trial(steps=60),
)
"""Trials that expose optimizers which use other elements only beyond some norm or after a few
steps."""
_OF_TORCH = frozenset(
    kind
    for name in (
        *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"),
        *("Rprop", "ASGD", "SparseAdam", "Adafactor", "Muon", "LBFGS"),
    )
    if (kind := getattr(torch.optim, name, None)) is not None
)
"""The classes for which the first trial is conclusive."""
_LEARNING_RATE = 0.1
"""The learning rate of trials if the optimizer's is 0 at first."""
Span = tuple[int, int, int]
"""A tensor number, and the first and the last + 1 element, counted over both tensors in sequence."""
_TOGETHER: list[list[Span]] = [[(0, 0, 24), (1, 24, 48)]]
_APART: list[list[Span]] = [[(0, 0, 24)], [(1, 24, 48)]]
_CUT: list[list[Span]] = [[(0, 0, 8)], [(0, 8, 24), (1, 24, 36)], [(1, 36, 48)]]


def probe_cut_rule(
    plan: OptimizerSpec, parameters: Sequence[torch.nn.Parameter], module: torch.nn.Module
) -> OptimizerSpec:
    """Try the optimizers on a few numbers, and return ``plan`` with the rule for cutting its
    slices.

    Args:
        plan: The optimizers of ``module``.
        parameters: The trainable parameters, in layout order.
        module: The model.

    Raises:
        ModelError: An optimizer does not work at all on such parameters.
    """
    number = {id(p): i for i, p in enumerate(parameters)}
    tables = {number[key] for key in sparse_tables(module) if key in number}
    dimensions = [p.ndim for p in parameters]
    traits = [t for part in plan.parts for t in _traits_of(part, dimensions, tables)]
    return replace(
        plan,
        elementwise=all(t.elementwise for t in traits),
        separate=all(t.separate for t in traits),
    )


def _traits_of(part: GroupSpec, dimensions: Sequence[int], tables: set[int]) -> list[CutRule]:
    """Return one rule for each group that has parameters, since the kind may depend on
    hyperparameters."""
    found = []
    for group, members, ndim in zip(part.groups, part.members, part.dimensions, strict=True):
        if members:
            alone = replace(part, groups=(group,), members=((0, 1),), dimensions=(ndim,))
            dense = {dimensions[n] for n in members if n not in tables}
            plan = OptimizerSpec(parts=(alone,))
            found.append(find_traits(plan, dense, any(n in tables for n in members), part.kind))
    return found


# One thread: the tensors are tiny, and on busy cores a second thread would only add waiting.
@torch_threads(1)
def find_traits(
    plan: OptimizerSpec,
    dimensions: Iterable[int],
    tables: bool,
    kind: type[torch.optim.Optimizer],
) -> CutRule:
    """Return the rule of an optimizer with one group, whose parameters are numbers 0 and 1.

    Updates are compared, in float64, so that a small learning rate hides no difference.

    Args:
        plan: The optimizer.
        dimensions: The numbers of dimensions of the dense parameters that it will be used for.
        tables: Whether it will be used for tables with sparse gradients too.
        kind: The optimizer's class.

    Raises:
        ModelError: The optimizer does not work at all on such parameters.
    """
    known = declared(kind)
    further = () if known is not None or kind in _OF_TORCH else _FURTHER
    found = []
    for ndim in sorted({max(1, n) for n in dimensions}):
        shape = (_SIZE,) if ndim == 1 else (6, 4, *([1] * (ndim - 2)))
        try:
            _update(plan, shape, _TOGETHER, False, _FIRST)
            _check_memory(plan, shape)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"optimizer {plan.name} fails on a parameter of {ndim} dimension"
                f"{'s' if ndim > 1 else ''} with a dense gradient ({_text(error)}). {SEVERAL}"
            ) from error
        found += [_seen_in(trial, plan, shape, False) for trial in (_FIRST, *further)]
    if tables:
        shape = (_SIZE // _WIDTH, _WIDTH)
        try:
            _update(plan, shape, _TOGETHER, True, _FIRST)
        except Exception as error:
            raise ModelError(
                f"optimizer {plan.name} does not take the sparse gradients of an embedding with "
                f"sparse=True ({_text(error)}). Give the embedding another optimizer by its name, "
                'optimizer={"embedding": torch.optim.SparseAdam, "": torch.optim.Adam}, or build '
                "it with sparse=False."
            ) from error
        found += [_seen_in(trial, plan, shape, True) for trial in (_FIRST, *further)]
    return known or CutRule(all(t.elementwise for t in found), all(t.separate for t in found))


def _text(error: Exception) -> str:
    """Return a short text of an error; torch adds pages about its backends to some."""
    first = (str(error).splitlines() or [""])[0].partition(". ")[0]
    return f"{type(error).__name__}: {first.rstrip('. ')}"


def _same(one: torch.Tensor, other: torch.Tensor, scale: float = 1.0) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-14 * scale, equal_nan=True)


def _seen_in(trial: _Trial, plan: OptimizerSpec, shape: tuple[int, ...], sparse: bool) -> CutRule:
    """Return the rule that one trial shows; no restriction if the trial fails even without a cut."""
    try:
        together = _update(plan, shape, _TOGETHER, sparse, trial)
    except Exception:
        return CutRule(elementwise=True, separate=True)
    try:
        apart = _update(plan, shape, _APART, sparse, trial)
    except Exception:  # it needs all tensors
        return CutRule(elementwise=False, separate=False)
    try:
        cut = _same(_update(plan, shape, _CUT, sparse, trial), apart, trial.weights)
    except Exception:  # it needs a matrix, for example
        cut = False
    return CutRule(cut, _same(together, apart, trial.weights))


def _check_memory(plan: OptimizerSpec, shape: tuple[int, ...]) -> None:
    """Raise ModelError if the optimizer keeps anything outside ``state`` from step to step.

    In training each step is made by another instance of the optimizer.
    """
    with seeded(0):
        ours = _update(plan, shape, _TOGETHER, False, _Trial(steps=_STEPS_OF_A_LIFE))
    with seeded(0):
        drawn = _drawn(_STEPS_OF_A_LIFE)
        tensors = {n: drawn[0, n * _SIZE : (n + 1) * _SIZE].view(shape).clone() for n in (0, 1)}
        (optimizer,) = plan.build(tensors, _hyperparameters(plan))
        before = [_values(group) for group in optimizer.param_groups]
        for gradients in drawn[1:]:
            for n, tensor in tensors.items():
                tensor.grad = gradients[n * _SIZE : (n + 1) * _SIZE].view(shape).clone()
            if wants_loss(type(optimizer)):  # type: ignore[arg-type]
                optimizer.step(evaluate_once(torch.tensor(1.0).double(), plan.name))
            else:
                optimizer.step()
    # collected again, because the optimizer may have replaced their memory
    living = torch.cat([tensors[n].reshape(-1) for n in (0, 1)])
    if _same(ours, living - drawn[0]):
        return
    after = [_values(group) for group in optimizer.param_groups]
    names = {
        name for a, b in zip(before, after, strict=True) for name in b if b[name] != a.get(name)
    }
    found = f" ({', '.join(sorted(names))} in its param_groups)" if names else ""
    raise ModelError(
        f"optimizer {plan.name} keeps values from step to step outside its state{found}, but the "
        "next step may run on another executor, which gets only the state. Keep them in "
        "self.state[parameter], as torch.optim does."
    )


def _hyperparameters(plan: OptimizerSpec) -> list[Mapping[str, Any]]:
    """Return the hyperparameters of the group, with a learning rate that is not 0."""
    (group,) = plan.groups
    rate = group.get("lr")
    if not isinstance(rate, int | float | torch.Tensor) or float(rate) != 0:
        return [group]
    other = torch.full_like(rate, _LEARNING_RATE) if isinstance(rate, torch.Tensor) else None
    return [{**group, "lr": _LEARNING_RATE if other is None else other}]


def _values(group: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if name != "params"}


def _drawn(steps: int) -> torch.Tensor:
    """Draw 48 weights, and their gradients for each step."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(steps + 1, 2 * _SIZE, generator=generator, dtype=torch.float64)


def _update(
    plan: OptimizerSpec,
    shape: tuple[int, ...],
    cuts: list[list[Span]],
    sparse: bool,
    trial: _Trial,
) -> torch.Tensor:
    """Return the change of 48 weights after a few steps on slices with the fragments ``cuts``."""
    drawn, updates = _drawn(trial.steps), []
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
            step_slice(
                piece_plan,
                state,
                dense,
                frozenset(),
                plan,
                values,
                rows,
                torch.tensor(1.0).double(),
            )
        updates.append(state.weights - drawn[0, start:stop])
    return torch.cat(updates)


def _fragment(
    number: int, shape: tuple[int, ...], low: int, high: int, start: int, sparse: bool
) -> Fragment:
    if sparse:
        shape = ((high - low) // _WIDTH, _WIDTH)
    elif high - low < _SIZE:
        shape = ()
    row = low % _SIZE // _WIDTH
    return Fragment(number, "parameter", low - start, high - low, shape, sparse, row)


def _rows(fragment: Fragment, dense: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows with a gradient: every third row of the tensor has none."""
    rows = torch.tensor(
        [r for r in range(fragment.shape[0]) if (r + fragment.first_row + step) % 3]
    )
    return rows.long(), dense[fragment.start : fragment.stop].view(fragment.shape)[rows.long()]
