"""Gradients that the ranks of a gang sum, where passes differ or what travels is narrow."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pyspark import cloudpickle
from real_ranks import WORLD
from torch import nn

from sparkdl.consistency.gossip import TOPOLOGIES
from sparkdl.data.batches import Batch
from sparkdl.engines.gang.model_group import GlobalBatchNorm, check_carried, synchronise
from sparkdl.engines.gang.strategies.base import GradientVector, RankPass, SummedGradients
from sparkdl.engines.gang.strategies.ddp import BucketedDDP, FlatAllReduce, GossipSync
from sparkdl.errors import SessionError
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.parallel.ddp import DDP
from sparkdl.parallel.plan import STRATEGIES, parallel_of
from sparkdl.replica.compute import MiniBatch, forward_backward, padding_pass
from sparkdl.replica.iteration import Clock
from sparkdl.slices.optimizer import OptimizerSpec
from sparkdl.slices.spec import slice_specs
from sparkdl.slices.update import SliceUpdater

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROWS = tuple((0, 4) for _ in range(WORLD))
GOSSIPED = 4


class Sometimes(nn.Module):
    """Uses its second layer for batches of a positive sum."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if float(x.sum()) > 0 else y


def gossiping(communicator: Any, topology: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The own weights of a rank after some iterations, and the mean that it then shows."""
    rank, factory = communicator.rank, partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    recipe = Recipe(
        partial(nn.Linear, 3, 1), nn.MSELoss(), factory, 0, TrainingOptions(topology=topology)
    )
    live = LiveReplica.of(recipe)
    parameters, layout = [p for _, p in live.flat.parameters], live.flat.layout
    optimizer = OptimizerSpec.of(recipe, parameters, live.flat.module)
    (plan,) = slice_specs(layout, 1)
    whole = SliceUpdater.of(plan, optimizer, recipe.options, layout, separable=True)
    way = GossipSync(live, rank, whole)
    batch = MiniBatch([torch.full((4, 3), 0.3 * rank)], [torch.full((4, 1), float(rank))])
    for index in range(GOSSIPED):
        step = SimpleNamespace(index=index, loss_scale=1.0, hyperparameters=None)
        own = SimpleNamespace(step=step, seed=lambda *named: 0)
        way.compute(RankPass(own, [batch], [4.0] * WORLD, Clock()))
        assert way.sections(ROWS, [4.0] * WORLD) == {}
    kept = way.kept
    found = kept[len(parameters)]["weights"].clone()
    way.settle()
    mean = live.flat.flat.clone()
    assert torch.equal(way.kept[len(parameters)]["weights"], found)  # type: ignore[index]
    way.compute(RankPass(own, [batch], [4.0] * WORLD, Clock()))
    assert torch.equal(live.flat.flat, found)
    dist.barrier()
    return found, mean


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_rank_averages_with_its_neighbours(ranks, topology):
    """As in plain torch; then all show the mean, and go on from their own."""
    copies = [Recipe(partial(nn.Linear, 3, 1), nn.MSELoss(), None, 0).build() for _ in ROWS]
    steps = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5) for module in copies]
    for index in range(GOSSIPED):
        for rank, (module, step) in enumerate(zip(copies, steps, strict=True)):
            step.zero_grad()
            output = module(torch.full((4, 3), 0.3 * rank))
            nn.functional.mse_loss(output, torch.full((4, 1), float(rank))).backward()
            step.step()
        vectors = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in copies]
        weights = TOPOLOGIES[topology](WORLD, index)
        for rank, module in enumerate(copies):
            mixed = sum(w * vectors[(rank - places) % WORLD] for places, w in weights.items())
            nn.utils.vector_to_parameters(mixed, module.parameters())
    found = ranks.run(WORLD, gossiping, topology)
    mean = torch.stack([own for own, _ in found]).mean(0)
    for (own, shown), module in zip(found, copies, strict=True):
        wanted = torch.cat([module.weight[0], module.bias]).detach()
        torch.testing.assert_close(torch.cat([own[:3], own[16:17]]), wanted)
        assert torch.equal(shown, found[0][1])
        torch.testing.assert_close(shown, mean)


def work() -> Any:
    step = SimpleNamespace(loss_scale=1.0, rows=ROWS)
    return SimpleNamespace(step=step, seed=lambda: 0)


def one_rank(
    communicator: Any, kind: str, wire: str, fill: float, alone: bool = False
) -> dict[str, Any]:
    """One iteration of a rank; the first one's batch is ``fill``, the others' its negative; ``alone``:
    what these have counts for nothing."""
    rank, weights = communicator.rank, [4.0, *[4.0 * (not alone)] * (WORLD - 1)]
    torch.manual_seed(0)
    live = LiveReplica.of(
        Recipe(Sometimes, nn.MSELoss(), torch.optim.SGD, 0, TrainingOptions(wire=wire))
    )
    plans = slice_specs(live.flat.layout, 1)
    spare = Batch([np.ones((2, 3), np.float32)], [np.ones((2, 3), np.float32)], None)
    build: Any = SimpleNamespace(live=live, plans=plans, rank=rank, spare=spare)
    if kind == "copies":
        build.groups = SimpleNamespace(along={"data": dist.group.WORLD}.get)
        way: Any = SummedGradients(build, copies=True)
    elif kind == "at once":
        way = FlatAllReduce(build)
    else:
        way = BucketedDDP(build, DDP(find_unused_parameters=True))
    sign = 1.0 if rank == 0 else -1.0
    batch = MiniBatch([torch.full((4, 3), sign * fill)], [torch.ones(4, 3)])
    _, problem = way.compute(RankPass(work(), [batch], weights, Clock()))
    (contribution, *_) = way.sections(ROWS, weights)[0]
    found = {
        "problem": problem,
        "gradient": contribution.gradient.clone(),
        "absent": sorted(contribution.absent),
    }
    dist.barrier()
    return found


@pytest.mark.parametrize("kind", ["copies", "at once", "buckets"])
def test_a_parameter_that_one_rank_uses_is_updated_alike_on_all(ranks, kind):
    """A copy that left it out would drift away from the others."""
    first, *others = ranks.run(WORLD, one_rank, kind, "fp32", 1.0)
    assert first["problem"] == ""
    assert first["absent"] == []
    assert first["gradient"].abs().sum() > 0
    for other in others:
        assert other["absent"] == []
        assert torch.equal(other["gradient"], first["gradient"])


@pytest.mark.parametrize("kind", ["copies", "at once"])
def test_a_parameter_that_only_rows_without_weight_use_has_no_gradient(ranks, kind):
    """Else an optimizer with a memory would move it. DistributedDataParallel does not tell."""
    found = ranks.run(WORLD, one_rank, kind, "fp32", -1.0, True)
    assert all(each["absent"] == [2, 3] for each in found)


@pytest.mark.parametrize("fill", [3e4, 700.0], ids=["one rank's", "only their sum"])
@pytest.mark.parametrize("kind", ["copies", "at once", "buckets"])
def test_what_is_too_large_for_the_wire_is_noticed_before_it_is_applied(ranks, kind, fill):
    for found in ranks.run(WORLD, one_rank, kind, "fp16", fill):
        assert not found["gradient"].isfinite().all()
        assert found["problem"] == 'the gradient of "always.weight"'


def carried(communicator: Any, dimension: str) -> str:
    parallel = parallel_of({dimension: STRATEGIES[WORDS[dimension]]}, {dimension: WORLD}, WORLD)
    try:
        check_carried(parallel, torch.device("cuda"))
    except SessionError as error:
        return str(error)
    return ""


WORDS = {"pipe": "pipeline", "tensor": "tensor", "shard": "fsdp"}


@pytest.mark.parametrize("dimension", WORDS)
def test_what_gloo_does_not_carry_from_gpus_is_told(ranks, dimension):
    """Where ranks share a GPU."""
    told = {
        f'strategy="{WORDS[dimension]}" needs a GPU for each rank, and here ranks share one: use as '
        'many replicas as there are GPUs, or strategy="ddp".'
    }
    assert set(ranks.run(WORLD, carried, dimension)) == (told if dimension != "shard" else {""})


class Half(nn.Module):
    """In bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.bfloat16()).float()


def of_half(communicator: Any, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ranks that count for different parts: their sum, and the same in float32."""
    rank, weights = communicator.rank, [1.0 + n for n in range(WORLD)]
    torch.manual_seed(0)
    live = LiveReplica.of(Recipe(Half, nn.MSELoss(), torch.optim.SGD, 0, TrainingOptions()))
    plans = slice_specs(live.flat.layout, 1)
    spare = Batch([np.ones((2, 3), np.float32)], [np.ones((2, 3), np.float32)], None)
    build: Any = SimpleNamespace(live=live, plans=plans, rank=rank, spare=spare)
    torch.manual_seed(rank)
    batch = MiniBatch([torch.rand(4, 3)], [torch.rand(4, 3)])
    forward_backward(live, batch, 0, 1.0, Clock())
    gradients = [p.grad.clone() for _, p in live.flat.parameters]
    exact = GradientVector(live.flat.layout, live.device)
    exact.filled([g.float() for g in gradients], weights[rank] / sum(weights))
    expected = exact.sum(None).clone()
    if kind == "at once":
        way: Any = FlatAllReduce(build)
    else:
        way = BucketedDDP(build, DDP())
    way.compute(RankPass(work(), [batch], weights, Clock()))
    (contribution, *_) = way.sections(ROWS, weights)[0]
    found = contribution.gradient.clone()
    dist.barrier()
    return found, expected


@pytest.mark.parametrize(("kind", "rounded"), [("at once", 1e-6), ("buckets", 2**-8)], ids=str)
def test_gradients_of_lower_precision_are_not_rounded_before_they_are_summed(ranks, kind, rounded):
    """DistributedDataParallel leaves the sum in the parameter's dtype."""
    for found, expected in ranks.run(WORLD, of_half, kind):
        assert expected.any()
        assert torch.allclose(found, expected[: len(found)], rtol=rounded, atol=1e-7)


def half(communicator: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of images of which a few overflow half precision, if sums and counts were in it."""
    module = nn.BatchNorm2d(3)
    synchronise(module)
    assert type(module) is GlobalBatchNorm
    generator = torch.Generator().manual_seed(communicator.rank)
    images = 5.0 + torch.randn(2, 3, 100, 100, generator=generator)
    output = module(images.half())
    assert output.dtype == torch.float16
    return output.float(), module.running_var


def test_batch_norm_over_the_ranks_in_half_precision(ranks):
    found = ranks.run(WORLD, half)
    everything = torch.cat(
        [
            5.0 + torch.randn(2, 3, 100, 100, generator=torch.Generator().manual_seed(rank))
            for rank in range(WORLD)
        ]
    )
    module = nn.BatchNorm2d(3)
    expected = module(everything.half().float())
    assert torch.allclose(torch.cat([output for output, _ in found]), expected, atol=5e-3)
    assert torch.allclose(found[0][1], module.running_var, atol=1e-4)


def idle(communicator: Any) -> dict[str, torch.Tensor]:
    module = nn.BatchNorm1d(3)
    synchronise(module)
    with padding_pass(True):
        module(torch.ones(2, 3))
    return module.state_dict()


def test_an_iteration_without_any_sample_leaves_the_statistics_alone(ranks):
    before = nn.BatchNorm1d(3).state_dict()
    for state in ranks.run(WORLD, idle):
        for name, value in before.items():
            assert torch.equal(state[name], value), name
