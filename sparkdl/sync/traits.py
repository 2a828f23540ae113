"""What an optimizer can be cut into, found out by trying it on a few numbers.

Three kinds: one that treats every element by itself works on any cut; one that looks at a whole tensor
(its norm, its rows) works on slices cut between tensors; one that looks at all tensors together works
on one slice only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sparkdl.errors import ModelError
from sparkdl.replica.seeding import seeded
from sparkdl.replica.threads import torch_threads
from sparkdl.sync.apply import evaluate_once, step_slice, wants_loss
from sparkdl.sync.plan import Piece, SlicePlan
from sparkdl.sync.state import SliceState

if TYPE_CHECKING:
    from sparkdl.sync.optimizer import OptimizerPlan

SEVERAL = (
    "Give parameters that need another one their own, by name or pattern: "
    'optimizer={"encoder": torch.optim.Muon, "embedding": torch.optim.SparseAdam, "": '
    "torch.optim.AdamW}."
)
"""What to do where an optimizer does not take every parameter."""

_SIZE, _WIDTH = 24, 4
_STEPS = 3
_STEPS_OF_A_LIFE = 12
Span = tuple[int, int, int]
"""Tensor number, first and last element + 1 of both tensors one after the other."""
_TOGETHER: list[list[Span]] = [[(0, 0, 24), (1, 24, 48)]]
_APART: list[list[Span]] = [[(0, 0, 24)], [(1, 24, 48)]]
_CUT: list[list[Span]] = [[(0, 0, 8)], [(0, 8, 24), (1, 24, 36)], [(1, 36, 48)]]


@dataclass(frozen=True)
class Traits:
    """``elementwise``: a cut through a tensor changes nothing. ``separate``: what one tensor gets
    does not depend on the others."""

    elementwise: bool
    separate: bool


# Of a few numbers: where others want the cores too, a second thread would be waited for.
@torch_threads(1)
def find_traits(plan: OptimizerPlan, dimensions: Iterable[int], tables: bool) -> Traits:
    """Those of ``plan``, one group of the parameters 0 and 1.

    ``dimensions``: of the dense parameters it is for; ``tables``: it is for tables with sparse
    gradients as well. Compared in float64 and by the updates, so that a small learning rate hides
    nothing. Raises :class:`sparkdl.errors.ModelError` where it does not work at all.
    """
    found = []
    for ndim in sorted({max(1, n) for n in dimensions}):
        shape = (_SIZE,) if ndim == 1 else (6, 4, *([1] * (ndim - 2)))
        try:
            together, apart = (_update(plan, shape, cut, False) for cut in (_TOGETHER, _APART))
            _check_memory(plan, shape)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"optimizer {plan.name} fails on a parameter of {ndim} dimension"
                f"{'s' if ndim > 1 else ''} with a dense gradient ({_text(error)}). {SEVERAL}"
            ) from error
        found.append(Traits(_works_cut(plan, shape, apart, False), _same(together, apart)))
    if tables:
        shape = (_SIZE // _WIDTH, _WIDTH)
        try:
            together, apart = (_update(plan, shape, cut, True) for cut in (_TOGETHER, _APART))
        except Exception as error:
            raise ModelError(
                f"optimizer {plan.name} does not take the sparse gradients of an embedding with "
                f"sparse=True ({_text(error)}). Give the embedding another optimizer by its name, "
                'optimizer={"embedding": torch.optim.SparseAdam, "": torch.optim.Adam}, or build '
                "it with sparse=False."
            ) from error
        found.append(Traits(_works_cut(plan, shape, apart, True), _same(together, apart)))
    return Traits(all(t.elementwise for t in found), all(t.separate for t in found))


def _text(error: Exception) -> str:
    """What went wrong; torch adds pages about its backends to some errors."""
    first = (str(error).splitlines() or [""])[0].partition(". ")[0]
    return f"{type(error).__name__}: {first.rstrip('. ')}"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-14, equal_nan=True)


def _works_cut(
    plan: OptimizerPlan, shape: tuple[int, ...], apart: torch.Tensor, sparse: bool
) -> bool:
    try:
        return _same(_update(plan, shape, _CUT, sparse), apart)
    except Exception:  # it wants a matrix, say
        return False


def _check_memory(plan: OptimizerPlan, shape: tuple[int, ...]) -> None:
    """Raise :class:`sparkdl.errors.ModelError` for an optimizer that remembers what is not in its
    ``state``: here each step is another instance's."""
    with seeded(0):
        ours = _update(plan, shape, _TOGETHER, False, _STEPS_OF_A_LIFE)
    with seeded(0):
        drawn = _drawn(_STEPS_OF_A_LIFE)
        tensors = {n: drawn[0, n * _SIZE : (n + 1) * _SIZE].view(shape).clone() for n in (0, 1)}
        (optimizer,) = plan.build(tensors)
        before = [_values(group) for group in optimizer.param_groups]
        for gradients in drawn[1:]:
            for n, tensor in tensors.items():
                tensor.grad = gradients[n * _SIZE : (n + 1) * _SIZE].view(shape).clone()
            if wants_loss(type(optimizer)):  # type: ignore[arg-type]
                optimizer.step(evaluate_once(torch.tensor(1.0).double(), plan.name))
            else:
                optimizer.step()
    living = torch.cat([tensors[n].reshape(-1) for n in (0, 1)])  # it may have given them memory
    if _same(ours, living - drawn[0]):
        return
    after = [_values(group) for group in optimizer.param_groups]
    names = {
        name for a, b in zip(before, after, strict=True) for name in b if b[name] != a.get(name)
    }
    found = f" ({', '.join(sorted(names))} in its param_groups)" if names else ""
    raise ModelError(
        f"optimizer {plan.name} remembers from step to step what is not in its state{found}, and here "
        "a step may be taken on another executor, where only the state goes. Keep it in "
        "self.state[parameter], as torch.optim does."
    )


def _values(group: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if name != "params"}


def _drawn(steps: int) -> torch.Tensor:
    """48 weights, and gradients of them for each step."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(steps + 1, 2 * _SIZE, generator=generator, dtype=torch.float64)


def _update(
    plan: OptimizerPlan,
    shape: tuple[int, ...],
    cuts: list[list[Span]],
    sparse: bool,
    steps: int = _STEPS,
) -> torch.Tensor:
    """The change of 48 weights in a few steps on slices with the pieces ``cuts``."""
    drawn, updates = _drawn(steps), []
    for index, spans in enumerate(cuts):
        start, stop = spans[0][1], spans[-1][2]
        pieces = tuple(_piece(number, shape, a, b, start, sparse) for number, a, b in spans)
        piece_plan = SlicePlan(index, start, stop, pieces)
        state = SliceState(drawn[0, start:stop].clone())
        for step, gradients in enumerate(drawn[1:]):
            dense = gradients[start:stop].clone()
            rows = {p.number: _rows(p, dense, step) for p in pieces} if sparse else None
            step_slice(
                piece_plan, state, dense, frozenset(), plan, None, rows, torch.tensor(1.0).double()
            )
        updates.append(state.weights - drawn[0, start:stop])
    return torch.cat(updates)


def _piece(
    number: int, shape: tuple[int, ...], low: int, high: int, start: int, sparse: bool
) -> Piece:
    if sparse:
        shape = ((high - low) // _WIDTH, _WIDTH)
    elif high - low < _SIZE:
        shape = ()
    row = low % _SIZE // _WIDTH
    return Piece(number, "parameter", low - start, high - low, shape, sparse, row)


def _rows(piece: Piece, dense: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every third row of the tensor has no gradient."""
    rows = torch.tensor([r for r in range(piece.shape[0]) if (r + piece.first_row + step) % 3])
    return rows.long(), dense[piece.start : piece.stop].view(piece.shape)[rows.long()]
