"""The update of the slices that a rank owns, and of its copies of what other ranks own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sparkdl.engines.gang.rank_messages import gathered
from sparkdl.engines.gang.rank_state import RankState
from sparkdl.replica.iteration import Clock, IterationRows, SliceReport
from sparkdl.replica.run import RunSpec
from sparkdl.slices.reduce import ReducedGradient
from sparkdl.slices.section import Section


def update_slices(
    held: RankState,
    run: RunSpec,
    node_id: str,
    step: IterationRows,
    sections: Mapping[int, list[Section]],
    loss: float,
    clock: Clock,
) -> list[SliceReport]:
    """Regularize, clip and update this rank's slices, and send their weights to the other ranks.

    Slices without sections stay as they are. The reports are on those that no earlier rank updates.
    """
    known: dict[int, ReducedGradient] = {}
    squares = [0.0] * run.slices
    for n, owner in held.owners.items():
        if owner.clips_norm:
            state = held.states[n]
            length, device = owner.plan.dense_length, state.weights.device
            memory = torch.empty(length, dtype=owner.dtype, device=device)
            known[n] = owner.reduce(sections[n], state.weights, memory)
            squares[n] = held.counted[n].squared_norm(known[n])
    if known and run.slices > 1:
        mine = squares if held.first else [0.0] * len(squares)
        squares = [many[r] for r, many in enumerate(gathered(mine))]
    slices = []
    for n in sections:
        owner, state = held.owners[n], held.states[n]
        updated = owner.update(
            state,
            state,
            sections[n],
            step.hyperparameters,
            known=known.get(n),
            squares=squares,
            loss=loss,
            seed=step.update_seed(run.seed),
            shown=held.counted[n].plan.parameters if step.histograms else (),
        )
        clock.lap("update")
        if held.first:
            found = updated.histograms
            slices.append(SliceReport(n, node_id, None, norm=updated.norm, histograms=found))
    held.share()
    clock.lap("publish")
    return slices
