"""What a process derives from a run once: slices, the optimizer, what each owner needs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from sparkdl.model.flat import Layout
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.run import RunSpec, open_replica
from sparkdl.slices.optimizer import OptimizerSpec
from sparkdl.slices.spec import SliceSpec, slice_specs
from sparkdl.slices.update import SliceUpdater


@dataclass(frozen=True)
class OpenRun:
    """The owners of a run's slices, and the one owner that all of it would have."""

    owners: list[SliceUpdater]
    whole: SliceUpdater
    layout: Layout

    @staticmethod
    def of(replica: LiveReplica, run: RunSpec) -> OpenRun:
        """Derive from a built recipe. What the optimizers allow the driver has tried, for all."""
        recipe, layout = replica.recipe, replica.flat.layout
        parameters = [parameter for _, parameter in replica.flat.parameters]
        optimizer = OptimizerSpec.of(recipe, parameters, replica.flat.module)
        plans = slice_specs(layout, run.slices, whole=run.whole_tensors) + slice_specs(layout, 1)
        *owners, whole = (
            SliceUpdater.of(plan, optimizer, recipe.policy, layout, not run.whole_tensors)
            for plan in plans
        )
        return OpenRun(owners, whole, layout)

    @property
    def slices(self) -> list[SliceSpec]:
        return [owner.plan for owner in self.owners]

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype


_plans: OrderedDict[str, OpenRun] = OrderedDict()
_KEEP = 2


def plans_of(run: RunSpec) -> OpenRun:
    """The plans of ``run``, kept between tasks."""
    run.numerics.use()
    plans = _plans.get(run.key)
    if plans is None:
        plans = _plans[run.key] = OpenRun.of(open_replica(run), run)
        while len(_plans) > _KEEP:
            _plans.popitem(last=False)
    return plans
