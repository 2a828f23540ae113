"""What a process derives from a run once: slices, the optimizer, what each owner needs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from sparkdl.model.flat import Layout
from sparkdl.model.live_replica import LiveReplica
from sparkdl.replica.run import Run, open_replica
from sparkdl.slices.optimizer import OptimizerPlan
from sparkdl.slices.spec import SlicePlan, slice_plans
from sparkdl.slices.update import Owner


@dataclass(frozen=True)
class RunPlans:
    """The owners of a run's slices, and the one owner that all of it would have."""

    owners: list[Owner]
    whole: Owner
    layout: Layout

    @staticmethod
    def of(replica: LiveReplica, run: Run) -> RunPlans:
        """Derive from a built recipe. What the optimizers allow the driver has tried, for all."""
        recipe, layout = replica.recipe, replica.flat.layout
        parameters = [parameter for _, parameter in replica.flat.parameters]
        optimizer = OptimizerPlan.of(recipe, parameters, replica.flat.module)
        plans = slice_plans(layout, run.slices, whole=run.whole_tensors) + slice_plans(layout, 1)
        *owners, whole = (
            Owner.of(plan, optimizer, recipe.policy, layout, not run.whole_tensors)
            for plan in plans
        )
        return RunPlans(owners, whole, layout)

    @property
    def slices(self) -> list[SlicePlan]:
        return [owner.plan for owner in self.owners]

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype


_plans: OrderedDict[str, RunPlans] = OrderedDict()
_KEEP = 2


def plans_of(run: Run) -> RunPlans:
    """The plans of ``run``, kept between tasks."""
    run.numerics.use()
    plans = _plans.get(run.key)
    if plans is None:
        plans = _plans[run.key] = RunPlans.of(open_replica(run), run)
        while len(_plans) > _KEEP:
            _plans.popitem(last=False)
    return plans
