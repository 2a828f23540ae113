"""Pipeline parallelism: a rank has some of the stages of a pipeline, the modules between two cuts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from sparkdl.engines.gang.rank_state import needs_all_losses
from sparkdl.engines.gang.strategies.base import Build, GradientSync, RankStrategy
from sparkdl.engines.gang.strategies.pipeline_stages import (
    PipelineBuild,
    StageModule,
    StagePlacement,
)
from sparkdl.engines.gang.strategies.pipeline_sync import PipelineSync
from sparkdl.parallel.chain import chain_of
from sparkdl.parallel.pipeline import Pipeline, bounds_of
from sparkdl.replica.mini_batch import to_tensors


class PipelineRank(RankStrategy[Pipeline]):
    """A rank with some of the stages of a pipeline, all cuts of which are named."""

    order = 1

    def __init__(self, strategy: Pipeline, build: Build) -> None:
        super().__init__(strategy, build)
        rows = to_tensors(build.spare.inputs)
        self._items = chain_of(build.module, strategy.split, rows)

    def split(self, build: Build) -> None:
        """Make modules of the stages of this rank, and free what other ranks hold."""
        module, items = build.module, self._items
        cuts = list(itertools.pairwise(bounds_of(self._strategy, items)))
        stage_of = {
            id(tensor): stage
            for stage, (start, stop) in enumerate(cuts)
            for _, item in items[start:stop]
            for tensor in itertools.chain(item.parameters(), item.buffers())
        }
        tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
        stages_of = [stage_of.get(id(tensors[each.name]), 0) for each in build.whole.segments]
        places = tuple(stage % build.mesh.pipe for stage in stages_of)
        self._placement = StagePlacement(len(cuts), build.mesh, places)
        mine = self._placement.stages(build.rank)
        for owner, name, parameter in _parameters(module):
            if stage_of.get(id(parameter), 0) not in mine:  # the first has what is never called
                _empty(owner, name, parameter)
        self._stages = [StageModule(items[slice(*cuts[stage])]) for stage in mine]
        build.outermost, build.numbers = [*self._stages], self._placement.numbers

    def finish(self, build: Build) -> None:
        for stage in self._stages:
            stage.compute_as(build.live)

    def gradients(self, build: Build) -> GradientSync:
        return PipelineSync(
            PipelineBuild(build.live, self._stages, self._placement),
            build.plans,
            build.rank,
            build.spare,
            self._strategy,
            build.groups,
            build.near_rows(),
            needs_all_losses(build.state, build.setup.sums),
        )


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every parameter with each module and name that it has."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            yield child, name, parameter


def _empty(owner: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Remove the values of a parameter, but keep its name and kind."""
    nothing = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype)
    if hasattr(parameter, "to_local"):  # a DTensor, whose data cannot become a plain tensor
        setattr(owner, name, nn.Parameter(nothing, parameter.requires_grad))
    else:
        parameter.data = nothing
