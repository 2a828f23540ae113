"""Local steps: a replica takes several optimizer steps by itself before the replicas meet.

Stich, "Local SGD Converges Fast and Communicates Little", 2019. Each round starts from the owners'
state, so a replica keeps nothing between rounds. The moments of the optimizer are averaged like the
weights (Yu et al., 2019).

With an outer optimizer (:class:`sparkdl.DiLoCo`) a replica keeps the state of its optimizer, and sends
the way back, from the end of its steps to their beginning, as a gradient. It may stop early; what it
sends then has the weight that all of its steps would have had.

The optimizer state that a replica keeps for its own steps, as tensors by parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from sparkdl.codec.packed import ByParameter
from sparkdl.errors import ModelError
from sparkdl.model.recipe import LiveReplica
from sparkdl.replica.compute import Losses, MiniBatch, added_up, forward_backward
from sparkdl.replica.iteration import INNER_STEPS, Clock, EarlyStop, PassedParts
from sparkdl.replica.step import Gradients, ReplicaIteration, ReplicaResult, take_gradients
from sparkdl.slices.optimizer_step import step_slice
from sparkdl.slices.reduce import ReducedGradient, clip_norm, clip_values, penalize, squared_norm
from sparkdl.slices.section import sums_up
from sparkdl.slices.spec import SliceSpec, SliceState, pack
from sparkdl.slices.update import EMA, EVALUATED, SliceUpdater

_ARRAY, _OTHER, _WEIGHTS = "array.", "other.", "weights"
_NUMBERS = {int: "int.", float: "float."}
"""The prefixes of the names of tensors that stand for numbers, by the types of these."""


def keep_inner(plan: SliceSpec, state: SliceState) -> dict[int, dict[str, torch.Tensor]]:
    """Return the optimizer state of ``plan``, the single slice that is the whole flat vector."""
    kept: dict[int, dict[str, torch.Tensor]] = {}
    for part in plan.parameters:
        if part.number not in state.held:
            continue
        named = kept[part.number] = {}
        for name in state.held[part.number]:
            named[_ARRAY + name] = state.arrays[name][part.start : part.stop].cpu()
        for name, value in state.others[part.number].items():
            if type(value) in _NUMBERS:
                kind = torch.int64 if type(value) is int else torch.float64
                named[_NUMBERS[type(value)] + name] = torch.tensor(value, dtype=kind)
                continue
            if not isinstance(value, torch.Tensor):
                raise ModelError(
                    "the consistency model keeps the state of each replica's optimizer, and "
                    f'"{name}" in it is {type(value).__name__}, no tensor or number: use another '
                    "optimizer, such as torch.optim.AdamW."
                )
            named[_OTHER + name] = value.detach().cpu()
    return kept


def open_inner(plan: SliceSpec, kept: ByParameter, device: torch.device) -> SliceState:
    """Return the state that :func:`keep_inner` kept, in its own memory, with empty ``weights``."""
    state = SliceState(torch.empty(0, device=device))
    for part in plan.parameters:
        named = kept.get(part.number)
        if not named:
            continue
        arrays = {k.removeprefix(_ARRAY): v for k, v in named.items() if k.startswith(_ARRAY)}
        state.held[part.number] = tuple(arrays)
        state.others[part.number] = {
            k.removeprefix(_OTHER): v.clone() for k, v in named.items() if k.startswith(_OTHER)
        }
        for kind, begin in _NUMBERS.items():
            numbers = {k.removeprefix(begin): v for k, v in named.items() if k.startswith(begin)}
            state.others[part.number] |= {name: kind(v) for name, v in numbers.items()}
        for name, values in arrays.items():
            if name not in state.arrays:
                length = plan.trainable_length
                state.arrays[name] = torch.zeros(length, dtype=values.dtype, device=device)
            state.arrays[name][part.start : part.stop].copy_(values)
    return state


def keep_replica(plan: SliceSpec, state: SliceState) -> dict[int, dict[str, torch.Tensor]]:
    """Return the result of :func:`keep_inner` with the weights, for a replica with its own."""
    return {**keep_inner(plan, state), len(plan.parameters): {_WEIGHTS: state.weights.cpu()}}


def open_replica_state(plan: SliceSpec, kept: ByParameter, weights: torch.Tensor) -> SliceState:
    """Return the state that :func:`keep_replica` kept, with ``weights`` as its memory.

    Weights that it kept are copied there.
    """
    state = open_inner(plan, kept, weights.device)
    own = kept.get(len(plan.parameters), {})
    if _WEIGHTS in own:
        weights.copy_(own[_WEIGHTS])
    return replace(state, weights=weights)


def several_steps(
    live: LiveReplica,
    batches: Iterable[MiniBatch],
    work: ReplicaIteration,
    state: SliceState,
    whole: SliceUpdater,
    clock: Clock,
) -> ReplicaResult:
    """Take one optimizer step for each mini-batch. The result contains the difference of the
    weights.

    ``state`` is over the whole flat vector, and is changed; ``whole`` updates the single slice that
    is this vector.
    """
    flat, layout, options = live.flat.flat, live.flat.layout, live.recipe.options
    begin = flat[: whole.plan.dense_length].clone()
    buffers = flat[layout.buffers_start :].clone()
    state = replace(state, weights=flat)
    total, total_weight, count = 0.0, 0.0, 0
    named: Losses = {}
    absent = frozenset(range(len(live.flat.parameters)))
    not_finite: set[int] = set()
    limit, stops = work.step.limit, None
    if limit is not None:
        stops = EarlyStop(limit, work.replica, clock, live.device)
    live.note_version("")  # from here on the weights are not those of any version
    for number, mini_batch in enumerate(batches):
        loss, weight, losses = forward_backward(
            live, mini_batch, work.seed(number), work.step.loss_scale, clock
        )
        named = added_up([named, losses])
        gradients = take_gradients(live)
        not_finite |= numbers_not_finite(live, gradients)
        step_alone(live, gradients, work, state, whole, loss, number)
        absent &= gradients.absent
        total += loss * weight
        total_weight += weight
        count += len(mini_batch)
        clock.lap("update")
        if stops is not None and stops(number + 1):
            break
    difference = flat[: whole.plan.dense_length] - begin
    flat[layout.buffers_start :].copy_(buffers)  # the present ones are in the module
    if options.outer:
        difference.neg_()
    gradients = Gradients(
        [
            None if number in absent else difference[s.start : s.stop].view(s.shape)
            for number, (s, _) in enumerate(live.flat.parameters)
        ],
        {},
        # clipping and some optimizers make a finite step of such a gradient; otherwise the
        # difference is checked later
        not_finite=frozenset(not_finite) or None,
    )
    assert layout.size == whole.plan.length
    loss = total / (total_weight or 1.0)
    moved = ReplicaResult(loss, total_weight, count, gradients, losses=named)
    if options.outer:
        moved = replace(moved, kept=keep_inner(whole.plan, state))
        return moved if stops is None else _with_rest(moved, number + 1, work, options.local_steps)
    if not total_weight:  # no step was taken, and the state is unchanged
        return moved
    arrays = {n: array for n, array in state.arrays.items() if n not in (EMA, EVALUATED)}
    return replace(moved, arrays=arrays, others=pack(state))


def _with_rest(
    moved: ReplicaResult, done: int, work: ReplicaIteration, steps: int
) -> ReplicaResult:
    """Return the result of ``done`` steps with the weight of all, and what was left out."""
    rows = work.rows[1] - work.rows[0]
    passed = PassedParts(done, min(steps, rows), rows - moved.count, INNER_STEPS)
    return replace(moved, weight=moved.weight * (rows / moved.count), passed=passed)


def step_alone(
    live: LiveReplica,
    gradients: Gradients,
    work: ReplicaIteration,
    state: SliceState,
    whole: SliceUpdater,
    loss: float,
    number: int = 0,
    factor: float = 1.0,
) -> None:
    """Take one step of a replica's own optimizer, which changes ``state``."""
    flat, options = live.flat.flat, whole.options
    reduced = ReducedGradient(_flatten(live, gradients, whole), gradients.absent)
    if factor != 1.0:
        reduced.gradient.mul_(factor)
    penalize(whole.plan, reduced, flat, whole.l1, whole.l2)
    if options.clip_value is not None:
        clip_values(reduced, options.clip_value)
    if options.clip_norm is not None:
        clip_norm(reduced, [squared_norm(whole.plan, reduced)], options.clip_norm)
    with torch.no_grad(), whole.drawing(work.seed(number, "update")):
        step_slice(
            whole.plan,
            state,
            reduced.gradient,
            reduced.absent,
            whole.optimizer,
            work.step.hyperparameters,
            loss=torch.tensor(loss, dtype=flat.dtype),
        )
    live.flat.save_buffers(flat)
    live.flat.refresh()


def without_rows(live: LiveReplica) -> Gradients:
    """Return the gradients of a replica that has no rows in an iteration, which are zero."""
    return Gradients([torch.zeros_like(parameter) for _, parameter in live.flat.parameters], {})


def numbers_not_finite(live: LiveReplica, gradients: Gradients) -> set[int]:
    """Return the numbers of the parameters whose gradient has an inf or a NaN."""
    return {
        number
        for number, gradient in enumerate(gradients.dense)
        if gradient is not None and not (sums_up(gradient) or gradient.isfinite().all())
    }


def problem_of_step(live: LiveReplica, loss: float, gradients: Gradients) -> str:
    """Return the name of a value of a pass that is inf or NaN, or an empty string."""
    if not math.isfinite(loss):
        return f"the loss ({loss})"
    wrong = numbers_not_finite(live, gradients)
    return f'the gradient of "{live.flat.parameters[min(wrong)][0].name}"' if wrong else ""


def _flatten(live: LiveReplica, gradients: Gradients, whole: SliceUpdater) -> torch.Tensor:
    flat = torch.zeros(
        whole.plan.dense_length, dtype=live.flat.layout.dtype, device=live.flat.flat.device
    )
    for (segment, _), gradient in zip(live.flat.parameters, gradients.dense, strict=True):
        if gradient is not None:
            flat[segment.start : segment.stop].view(segment.shape).copy_(gradient)
    return flat
