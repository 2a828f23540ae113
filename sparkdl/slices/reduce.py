"""The gradient that is applied to a slice, made from the sections of the replicas. Pure torch.

The order is: reduce (average, summed in the shape of a tree), add penalties, clip by value, clip by
global norm.

Sums whose bits do not depend on who computes which part: a binary tree over the replicas. Pure.

[Note: the shape of a sum] The bits of a floating-point sum depend on its brackets. Gradients are
first summed on the nodes of their replicas and then by the owner of a slice, and it is chance which
replicas share a node. So the numbers of the replicas alone determine the brackets: [0, 1], [2, 3]
and so on, then [0..3], [4..7], and so on up. A leaf is a replica's gradient times its share,
rounded. An inner node is left plus right, or the only one of them that exists. An aligned *block*
of 2**k replicas (those of it that exist) is a subtree: its sum may be computed anywhere, and the
bits of the total are the same.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sparkdl.model.buffers import MAX, MEAN, MIN, SUM, Rule, values_in
from sparkdl.model.flat import Layout
from sparkdl.process.determinism import seeded
from sparkdl.slices.section import NOTHING, OWN, SPARE, Section, SparseRows
from sparkdl.slices.spec import GROUP, SliceSpec, SliceState, unpack

CHUNK = 1 << 16
"""The number of elements that are summed at a time, so that the partial sums (one for each level)
stay in the cache."""


@dataclass(frozen=True)
class Term:
    """A term of a sum."""

    place: int  # the replica, or the first of a block that is summed already
    values: torch.Tensor
    share: float | None = None  # a factor; None: the values are added as they are


def additions(places: Sequence[int]) -> list[int]:
    """Return the order in which the tree adds up terms at ``places`` (ascending, all different).

    The terms are pushed on a stack in turn. Element i of the result says how often, after term i,
    the two topmost sums are replaced by their sum. The stack is never higher than the tree.
    """
    counts: list[int] = []
    joints: list[int] = []  # the levels at which neighbours on the stack are joined
    for i, place in enumerate(places):
        last = i + 1 == len(places)
        level = place.bit_length() + 64 if last else (place ^ places[i + 1]).bit_length()
        count = 0
        while joints and joints[-1] < level:
            joints.pop()
            count += 1
        counts.append(count)
        joints.append(level)
    return counts


def blocks(members: Collection[int], replicas: int) -> list[range]:
    """Return the largest aligned blocks of replicas 0 to ``replicas`` - 1 that contain only
    ``members``."""
    found: list[range] = []

    def search(start: int, size: int) -> None:
        there = range(start, min(start + size, replicas))
        if all(replica in members for replica in there):
            found.append(there)
        elif size > 1:
            search(start, size // 2)
            search(start + size // 2, size // 2)

    search(0, 1 << max(0, replicas - 1).bit_length())
    return [block for block in found if block]


@torch.no_grad()
def tree_sum(terms: Sequence[Term], out: torch.Tensor) -> torch.Tensor:
    """Write the sum in the shape of the tree into ``out``, in its dtype, and return it.

    ``out`` must not share memory with a term. See [Note: the shape of a sum].
    """
    ordered = sorted(terms, key=lambda term: term.place)
    counts = additions([term.place for term in ordered])
    if not ordered:
        return out.zero_()
    depth, height = 0, 0
    for count in counts:
        depth += 1
        height = max(height, depth)
        depth -= count
    spare = torch.empty(height - 1, min(CHUNK, len(out)), dtype=out.dtype)
    for start in range(0, len(out), CHUNK):
        place = out[start : start + CHUNK]
        stack = [place, *spare[:, : len(place)]]
        top = 0
        for term, count in zip(ordered, counts, strict=True):
            values = term.values[start : start + len(place)]
            if term.share is None:
                stack[top].copy_(values)
            elif values.dtype == out.dtype:
                torch.mul(values, term.share, out=stack[top])
            else:
                torch.mul(values.to(out.dtype), term.share, out=stack[top])
            for _ in range(count):
                top -= 1
                stack[top].add_(stack[top + 1])
            top += 1
    return out


NORM_EPSILON = 1e-6
"""Added to the norm before the division, as ``torch.nn.utils.clip_grad_norm_`` does."""


@dataclass
class ReducedGradient:
    """The gradient of the global batch's mean loss, for one slice. It is changed in place."""

    gradient: torch.Tensor
    absent: frozenset[int] = frozenset()  # the parameters for which no replica has a gradient
    tables: dict[int, SparseRows] = field(default_factory=dict)


def reduce_gradients(
    plan: SliceSpec, sections: Sequence[Section], out: torch.Tensor
) -> ReducedGradient:
    """Average the replicas' gradients over the global batch.

    Each replica is weighted by its samples. The sum has the order of [Note: the shape of a sum] and
    is made in the dtype of ``out``, whatever dtype was sent. The dense part of the result is
    ``out``, or the memory of a section of kind SPARE, which is the complete sum already.
    """
    ordered = sorted(sections, key=lambda section: section.replica)
    shares = shares_of([c.weight for c in ordered])
    spare = [c.gradient for c in ordered if c.kind == SPARE and c.gradient.dtype == out.dtype]
    if spare:
        (out,) = spare
    else:
        terms = [
            Term(c.replica, c.dense_gradient(plan, out.dtype), share if c.kind == OWN else None)
            for c, share in zip(ordered, shares, strict=True)
            if c.kind != NOTHING
        ]
        tree_sum(terms, out)
    tables = {}
    for fragment in plan.tables:
        parts = [
            (*c.tables[fragment.number], share)
            for c, share in zip(ordered, shares, strict=True)
            if fragment.number in c.tables
        ]
        if parts:
            tables[fragment.number] = _add_rows(parts, out.dtype)
    return ReducedGradient(out, frozenset.intersection(*[c.absent for c in ordered]), tables)


def shares_of(weights: Sequence[float]) -> list[float]:
    """Return the share of each replica in the average; ``weights`` are in replica order."""
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def _add_rows(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor, float]], dtype: torch.dtype
) -> SparseRows:
    """Return the weighted sum of some rows of a table, row by row in the order of ``parts``."""
    numbers = torch.unique(torch.cat([rows for rows, _, _ in parts]))
    total = torch.zeros(len(numbers), parts[0][1].shape[1], dtype=dtype)
    # a part has each row once, so no sum depends on the order of additions in index_add_
    for rows, values, share in parts:
        total.index_add_(0, torch.searchsorted(numbers, rows), values.to(dtype), alpha=share)
    return numbers, total


def penalties(value: float | Mapping[str, float], layout: Layout) -> dict[int, float]:
    """Return the strength of a penalty by parameter number.

    ``value`` is one strength for all dense parameters, or strengths by patterns of parameter names,
    which add up where several patterns match.
    """
    found = {}
    for number, segment in enumerate(layout.segments):
        if segment.kind != "parameter" or segment.sparse:
            continue
        if isinstance(value, Mapping):
            fitting = [v for pattern, v in value.items() if fnmatch.fnmatch(segment.name, pattern)]
            strength = sum(fitting)
        else:
            strength = value
        if strength:
            found[number] = float(strength)
    return found


def penalize(
    plan: SliceSpec,
    reduced: ReducedGradient,
    weights: torch.Tensor,
    l1: Mapping[int, float],
    l2: Mapping[int, float],
) -> None:
    """Add the gradient of ``l1 * sum |w| + l2 / 2 * sum w**2`` to the reduced gradient."""
    if not l1 and not l2:
        return
    for fragment in plan.parameters:
        if fragment.sparse or fragment.number in reduced.absent:
            continue
        place = reduced.gradient[fragment.start : fragment.stop]
        values = weights[fragment.start : fragment.stop]
        if fragment.number in l1:
            place.add_(values.sign(), alpha=l1[fragment.number])
        if fragment.number in l2:
            place.add_(values, alpha=l2[fragment.number])


def clip_values(reduced: ReducedGradient, limit: float) -> None:
    """Clamp every element to [-limit, limit], as ``torch.nn.utils.clip_grad_value_`` does."""
    reduced.gradient.clamp_(-limit, limit)
    for _, values in reduced.tables.values():
        values.clamp_(-limit, limit)


def squared_norm(plan: SliceSpec, reduced: ReducedGradient) -> float:
    """Return the sum of squares over the slice, in float64."""
    parts = [
        reduced.gradient[fragment.start : fragment.stop]
        for fragment in plan.parameters
        if not fragment.sparse and fragment.number not in reduced.absent
    ]
    parts += [values for _, values in reduced.tables.values()]
    norms = [torch.linalg.vector_norm(p, dtype=torch.float64) for p in parts if p.numel()]
    together = torch.stack(norms).tolist() if norms else []  # one wait for the GPU
    return sum((norm**2 for norm in together), 0.0)


def clip_factor(squares: Sequence[float], limit: float) -> tuple[float, float]:
    """Return the global norm, and the factor that makes the norm of a gradient at most ``limit``.

    ``squares`` is the :func:`squared_norm` of every slice, in slice order.
    """
    norm = math.sqrt(sum(squares))
    return norm, min(1.0, limit / (norm + NORM_EPSILON))


def clip_norm(reduced: ReducedGradient, squares: Sequence[float], limit: float) -> float:
    """Scale the gradient to a global norm of at most ``limit``; return the norm before.

    ``squares`` has the :func:`squared_norm` of every slice, in slice order.
    """
    norm, scale = clip_factor(squares, limit)
    if scale < 1.0:
        reduced.gradient.mul_(scale)
        for _, values in reduced.tables.values():
            values.mul_(scale)
    return norm


def scaled(reduced: ReducedGradient, scale: float, out: torch.Tensor) -> ReducedGradient:
    """Return a gradient times ``scale``, with ``out`` as the memory of its dense part."""
    torch.mul(reduced.gradient, scale, out=out)
    tables = {number: (rows, values * scale) for number, (rows, values) in reduced.tables.items()}
    return ReducedGradient(out, reduced.absent, tables)


def average(
    plan: SliceSpec, state: SliceState, moved: ReducedGradient, sections: Sequence[Section]
) -> None:
    """Average the replicas after local steps, in place in ``state``.

    The weights become the mean of the replicas' weights. The optimizer state of a parameter becomes
    the mean over the replicas that had a gradient for it; state that has no mean is taken from the
    first of these. Where none had one, only the numbers of its parameter group have changed.
    """
    state.weights[: plan.dense_length].add_(moved.gradient)
    ordered = sorted(sections, key=lambda section: section.replica)
    unpacked = {c.replica: unpack(c.others) for c in ordered if c.others}
    for fragment in plan.parameters:
        stepped = [
            c
            for c in ordered
            if c.replica in unpacked
            and fragment.number not in c.absent
            and fragment.number in unpacked[c.replica][1]
        ]
        if not stepped:
            _, others = next(iter(unpacked.values()), ({}, {}))
            group = {
                k: v for k, v in others.get(fragment.number, {}).items() if k.startswith(GROUP)
            }
            if group:
                state.held.setdefault(fragment.number, ())
                state.others[fragment.number] = {**state.others.get(fragment.number, {}), **group}
            continue
        held, others = unpacked[stepped[0].replica]
        state.held[fragment.number] = held[fragment.number]
        state.others[fragment.number] = others[fragment.number]
        shares = shares_of([c.weight for c in stepped])
        for name in held[fragment.number]:
            first = stepped[0].arrays[name]
            if name not in state.arrays:
                state.arrays[name] = torch.zeros_like(first, device=state.weights.device)
            place = state.arrays[name][fragment.start : fragment.stop]
            if not first.is_floating_point():
                place.copy_(first[fragment.start : fragment.stop])
                continue
            place.zero_()
            for c, share in zip(stepped, shares, strict=True):
                if name in c.arrays:
                    place.add_(c.arrays[name][fragment.start : fragment.stop], alpha=share)


def merge_buffers(
    plan: SliceSpec,
    sections: Sequence[Section],
    weights: torch.Tensor,
    seed: int = 0,
    behind: bool = False,
) -> None:
    """Merge buffers into ``weights`` by their rules, see :mod:`sparkdl.model.buffers`.

    A replica with weight 0 has not run a forward pass and is ignored. If all have, nothing changes.
    Replicas may be ``behind``: a range then keeps what versions that they have not read added to it.
    """
    ordered = sorted((c for c in sections if c.weight), key=lambda section: section.replica)
    single = [c for c in ordered if not c.repeats]
    means = []
    for fragment in plan.fragments if ordered else ():
        if fragment.kind == "parameter":
            continue
        counted = ordered if fragment.rule == MEAN else single
        place = slice(fragment.start - plan.buffers_start, fragment.stop - plan.buffers_start)
        kind, dtype = fragment.kind, fragment.dtype
        values = [values_in(c.buffers[place], kind, dtype) for c in counted]
        merged = values_in(weights[fragment.start : fragment.stop], kind, dtype)
        if callable(fragment.rule) and len(values) > 1:
            count, shape = math.prod(fragment.shape), fragment.shape
            stacked = torch.stack([each[:count].view(shape).to(dtype) for each in values])
            with seeded(seed):
                merged[:count].view(shape).copy_(fragment.rule(stacked))
        elif fragment.rule == MEAN and len(values) > 1:
            _average(values, [c.weight for c in counted], merged)
            means.append((values, merged))
        else:
            if behind and fragment.rule in (MIN, MAX):
                values.append(merged.clone())
            merge_values(fragment.rule, values, [], merged)
    if means and not torch.stack([merged.isfinite().all() for _, merged in means]).all():
        for values, merged in means:
            merge_values(MEAN, values, [c.weight for c in ordered], merged)


def merge_values(
    rule: Rule, values: Sequence[torch.Tensor], weights: Sequence[float], merged: torch.Tensor
) -> None:
    """Merge values, in order, into ``merged``, by a rule that is no function or has one value.

    For the rule "sum", ``values`` are what the replicas have added.
    """
    first, *others = values
    if rule == SUM:
        merged.add_(functools.reduce(torch.add, others, first))
        return
    merged.copy_(first)
    if rule == MEAN and others:
        _average(values, weights, merged, infinite=True)
    for other in others:
        if rule == MIN:
            torch.minimum(merged, other, out=merged)
        elif rule == MAX:
            torch.maximum(merged, other, out=merged)


def _average(
    values: Sequence[torch.Tensor],
    weights: Sequence[float],
    merged: torch.Tensor,
    infinite: bool = False,
) -> None:
    """Write the weighted mean as the first value + the sum of weighted differences.

    So values that are equal on all replicas keep their bits. If values may be ``infinite``, so is their
    mean, which would be the difference of infinities, NaN, otherwise.
    """
    first, total = values[0], sum(weights)
    merged.copy_(first)
    for other, weight in zip(values[1:], weights[1:], strict=True):
        same = other == first
        if infinite:
            same |= merged.isinf() & ~other.isnan()
        # -0.0: adding it changes no bit, not even that of a -0.0
        difference = torch.where(same, -0.0, other - first)
        merged.add_(difference, alpha=weight / total)
