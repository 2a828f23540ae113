"""What a rank of a gang builds: by its strategy, what it holds, and how gradients come together."""

from __future__ import annotations

from sparkdl.data.assemble import Batch
from sparkdl.gang.member import Member
from sparkdl.replica.live import LiveReplica
from sparkdl.replica.recipe import Recipe
from sparkdl.replica.run import Run
from sparkdl.step.streaming import streams
from sparkdl.train.batchnorm import synchronise
from sparkdl.train.data_parallel import AtOnce, DataParallel, Summed
from sparkdl.train.exchanged import Exchanged
from sparkdl.train.holding import Holding, Sharded, Whole
from sparkdl.train.rank_memory import memory_given_back
from sparkdl.train.shards import spans_of, spans_of_segments
from sparkdl.train.strategy import FSDP, Pipeline, Strategy


def hold(
    recipe: Recipe,
    run: Run,
    strategy: Strategy,
    spare: Batch,
    member: Member,
) -> tuple[Holding, Summed | Exchanged]:
    """Build the replica: what this rank holds of it, and how gradients come together."""
    held: Holding
    rank, device = member.rank, member.device
    if isinstance(strategy, FSDP):
        from sparkdl.train.fully_sharded import FullySharded, sharded

        member.at_end.enter_context(memory_given_back())
        live, whole = sharded(recipe, strategy, device)
        shards = member.size // strategy.copies
        spans = [spans_of(whole, shards, r) for r in range(shards)]
        held = Sharded(live, whole, run, rank, strategy.copies, lambda r: spans[r % shards])
        return held, FullySharded(live, [o.plan for o in held.owners.values()], rank, spare)
    if isinstance(strategy, Pipeline):
        from sparkdl.train.pipelined import Pipelined
        from sparkdl.train.staged import staged

        with memory_given_back():
            cut = staged(recipe, strategy, rank, member.size, device)
        numbers = cut.seats.numbers
        held = Sharded(
            cut.live,
            cut.whole,
            run,
            rank,
            strategy.copies,
            lambda r: spans_of_segments(cut.whole, numbers(r)),
        )
        plans = [o.plan for o in held.owners.values()]
        return held, Pipelined(cut, plans, rank, member.size, spare, strategy)
    live = LiveReplica.of(recipe, device)
    if recipe.policy.sync_batchnorm:
        synchronise(live.flat.module)
    held = Whole(live, run, rank)
    if not streams(live):
        return held, Exchanged(live, held.slices, held.owners, rank)
    plans = [held.slices[n] for n in held.owners]
    if AtOnce.suits(live, strategy):
        return held, AtOnce(live, plans, rank, spare)
    return held, DataParallel(live, plans, rank, spare, strategy)
