"""The state that a rank of a gang holds, and that of a rank with a whole model.

Outside the gang, in checkpoints, snapshots and results, there are only slices. A rank *owns* the slices
that it updates; it *places* their state before an iteration and *shares* the updated weights after one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from sparkdl.codec.safe import mapped
from sparkdl.loop.engine import CURRENT, weights_of
from sparkdl.model.recipe import LiveReplica
from sparkdl.replica.run import OpenRun, RunSpec
from sparkdl.replica.step import writes_early
from sparkdl.slices.optimizer_step import wants_loss
from sparkdl.slices.spec import SliceSpec, SliceState

States = dict[int, SliceState]
"""States by slice number."""


class RankState:
    """The state that a rank holds, here of a model that it has whole.

    There is either one slice, which all ranks own, or one for each rank. If the live replica's flat
    vector is on the device that updates it, the weights in ``states`` are views of it. All ranks call
    the methods at the same time.

    Attributes:
        slices: The slices of the whole state, as code outside the gang knows them.
        owners: What this rank updates. ``states`` and ``best`` have the same keys.
        counted: The parameters in ``owners`` that no earlier rank updates.
        first: Whether no earlier rank updates the same slices.
    """

    def __init__(self, live: LiveReplica, run: RunSpec, rank: int) -> None:
        plans = OpenRun.of(live, run)
        self.live, self.slices = live, plans.slices
        self.owners = {n: o for n, o in enumerate(plans.owners) if run.slices == 1 or n == rank}
        self.counted = self.owners
        self.first = run.slices > 1 or rank == 0
        self.states: States = {}
        self.best: States = {}

    def begin(self) -> None:
        """Begin with the recipe's weights."""
        flat = self.live.flat.flat
        self.place({n: SliceState(flat[part_of(self.slices[n])].clone()) for n in self.owners})

    def place(self, slices: States) -> None:
        """Continue from these states of the slices that this rank owns."""
        flat = self.live.flat.flat
        sums = writes_early(self.live) or self.live.recipe.options.keeps_own
        home = flat.device if sums else torch.device("cpu")
        for n, state in slices.items():
            place = flat[part_of(self.slices[n])]
            with torch.no_grad():
                place.copy_(state.weights)
            arrays = {name: array.to(home) for name, array in state.arrays.items()}
            self.states[n] = SliceState(place.to(home), arrays, state.held, state.others)
        self.share()

    def place_best(self, slices: States) -> None:
        """Place the weights that are kept as the best."""
        self.best = slices

    def keep_best(self) -> None:
        """Keep a copy of the current weights as the best."""
        states = self.states.items()
        self.best = {n: SliceState(weights_of(state, CURRENT).clone()) for n, state in states}

    def share(self) -> None:
        """Copy the updated weights to the ranks and devices that compute with them."""
        flat = self.live.flat.flat
        for n, state in self.states.items():
            if state.weights.device != flat.device:
                flat[part_of(self.slices[n])].copy_(state.weights)
        if len(self.slices) > 1:
            broadcast_parts(flat, self.slices, range(len(self.slices)))
        self.live.flat.refresh()

    def as_slices(self, states: States) -> States:
        """Return ``states`` or ``best`` as the slices that this rank owns, on the CPU."""
        return {n: on_cpu(state) for n, state in states.items()}


def needs_all_losses(held: RankState, sums: bool) -> bool:
    """Return whether an update needs the losses of all ranks, or whether they are finite.

    Then every rank must know the loss of its own samples.
    """
    options, owners = held.live.recipe.options, held.owners.values()
    kinds = [type(o) for owner in owners for o in owner.optimizer.schedule_targets()]
    leaves_out = options.on_nan == "skip" or options.scales_loss
    return leaves_out or sums or any(wants_loss(kind) for kind in kinds)  # type: ignore[arg-type]


@contextlib.contextmanager
def evaluated(held: RankState) -> Iterator[None]:
    """Let the replica have the weights that count, if the optimizer keeps them apart from those at
    which gradients are taken. All ranks call it at the same time."""
    if not any(owner.optimizer.evaluates for owner in held.owners.values()):
        yield
        return
    trained = {n: state.weights.clone() for n, state in held.states.items()}
    _write(held, {n: weights_of(state, CURRENT) for n, state in held.states.items()})
    try:
        yield
    finally:
        _write(held, trained)


@torch.no_grad()
def _write(held: RankState, weights: Mapping[int, torch.Tensor]) -> None:
    for n, state in held.states.items():
        state.weights.copy_(weights[n])
    held.share()


def part_of(plan: SliceSpec) -> slice:
    """Return where a slice lies in the flat vector."""
    return slice(plan.start, plan.stop)


def broadcast_parts(
    flat: torch.Tensor,
    plans: Sequence[SliceSpec],
    ranks: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Broadcast each slice from the rank that updated it."""
    sent = [
        dist.broadcast(flat[part_of(plan)], rank, group=group, async_op=True)
        for plan, rank in zip(plans, ranks, strict=True)
        if plan.length
    ]
    for work in sent:
        work.wait()


def on_cpu(state: SliceState) -> SliceState:
    """Return the state with all its tensors on the CPU."""
    if state.weights.device.type == "cpu":
        return state
    arrays = {name: array.cpu() for name, array in state.arrays.items()}
    others = mapped(state.others, torch.Tensor, torch.Tensor.cpu)
    return SliceState(state.weights.cpu(), arrays, state.held, others)
