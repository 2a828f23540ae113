"""The local engine: the same iteration in this process, no Spark jobs. For debugging, and the
reference that the shuffle engine is held against: the same M and N give the same bits."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch

from sparkdl.data.batches import EpochPlan, derive_seed, permutation
from sparkdl.data.partition import MappedPartition, SampleHandle, open_partition
from sparkdl.replica.flat import FlatModule
from sparkdl.replica.recipe import Recipe
from sparkdl.replica.run import Run
from sparkdl.step.compute import forward_backward, to_tensors, write_contribution
from sparkdl.sync.apply import step_slice
from sparkdl.sync.optimizer import OptimizerPlan
from sparkdl.sync.plan import slice_plans
from sparkdl.sync.records import ReplicaReport
from sparkdl.sync.state import SliceState
from sparkdl.sync.update import Contribution, merge_buffers, reduce_gradients
from sparkdl.train.engine import Iteration, StepResult, summarize


class LocalEngine:
    """M replicas one after another on one live module, N slices one after another."""

    def __init__(
        self, handles: Sequence[SampleHandle], run: Run, recipe: bytes, batch_size: int
    ) -> None:
        self.plan = EpochPlan(tuple(handle.num_rows for handle in handles), batch_size)
        self._run = run
        self._partitions: list[MappedPartition | None] = [
            open_partition(handle) if handle.num_rows else None for handle in handles
        ]
        loaded: Recipe = pickle.loads(recipe)
        self._replica = FlatModule(loaded.build())
        self._loss = loaded.loss
        parameters = [parameter for _, parameter in self._replica.parameters]
        self._optimizer = OptimizerPlan.of(loaded, parameters, self._replica.module)
        whole = not self._optimizer.elementwise
        self._slices = slice_plans(self._replica.layout, run.slices, whole)
        self._states = [
            SliceState(self._replica.flat[plan.start : plan.stop].clone()) for plan in self._slices
        ]
        self._contributions = [torch.zeros_like(self._replica.flat) for _ in range(run.replicas)]

    def step(self, iteration: Iteration) -> StepResult:
        """Run every replica and every slice, here and now."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._run.threads)
        try:
            flat = self._replica.flat
            for plan, state in zip(self._slices, self._states, strict=True):
                flat[plan.start : plan.stop].copy_(state.weights)
            reports, absent = [], {}
            for replica, (start, stop) in enumerate(self.plan.rows(iteration.batch)):
                if stop > start:
                    loss, absent[replica] = self._replica_step(iteration, replica, start, stop)
                    reports.append(ReplicaReport(replica, stop - start, loss, ""))
            for plan, state in zip(self._slices, self._states, strict=True):
                contributions = [
                    Contribution(
                        report.replica,
                        report.count,
                        self._contributions[report.replica][plan.start : plan.stop],
                        absent[report.replica],
                    )
                    for report in reports
                ]
                gradient = torch.empty(plan.trainable_length, dtype=flat.dtype)
                missing = reduce_gradients(plan, contributions, gradient)
                merge_buffers(plan, contributions, state.weights)
                step_slice(
                    plan, state, gradient, missing, self._optimizer, iteration.hyperparameters
                )
            return summarize(reports, {})
        finally:
            torch.set_num_threads(threads)

    def _replica_step(
        self, iteration: Iteration, replica: int, start: int, stop: int
    ) -> tuple[float, frozenset[int]]:
        """Forward and backward of one replica; its contribution stays in ``_contributions``."""
        partition = self._partitions[replica]
        assert partition is not None
        order = permutation(self._run.seed, iteration.epoch, replica, len(partition.order))
        tensors = to_tensors(partition.gather(order[start:stop]), self._replica.flat.device)
        self._replica.refresh()
        loss, gradients = forward_backward(
            self._replica,
            self._loss,
            tensors[: self._run.num_features],
            tensors[self._run.num_features :],
            derive_seed(self._run.seed, "forward", iteration.index, replica),
        )
        written = write_contribution(self._replica, gradients, self._contributions[replica])
        return loss, frozenset(written)

    def weights(self) -> torch.Tensor:
        return torch.cat([state.weights for state in self._states])
