"""Deliberate faults of one line: each of them must be caught by the tests named beside it.

A suite may be made smaller as long as ``test_faults.py`` holds. A row is a module of the package, what
stands there, what is put in its place, and the test files that must fail then. Rows are small and
plausible: a sum in another order, a weight ignored, a bound off by one, a fault swallowed.
"""

from __future__ import annotations

from typing import NamedTuple

from faults_of_gangs import OF_GANGS


class Fault(NamedTuple):
    """``text`` occurs in ``module``, and ``tests`` fail with ``instead`` in its place."""

    module: str
    text: str
    instead: str
    tests: str


FAULTS = {
    "terms are added up as they come": Fault(
        "slices/reduce.py",
        "ordered = sorted(terms, key=lambda term: term.place)",
        "ordered = list(terms)",
        "unit/slices/test_tree.py",
    ),
    "a sum has another shape": Fault(
        "slices/reduce.py",
        "while joints and joints[-1] < level:",
        "while joints and joints[-1] <= level + 1:",
        "unit/slices/test_tree.py",
    ),
    "replicas count alike in the mean": Fault(
        "slices/reduce.py",
        "return [weight / total if total else 0.0 for weight in weights]",
        "return [1 / len(weights) if total else 0.0 for weight in weights]",
        "unit/slices/test_reduce.py",
    ),
    "values are clipped from above only": Fault(
        "slices/reduce.py",
        "reduced.gradient.clamp_(-limit, limit)",
        "reduced.gradient.clamp_(max=limit)",
        "parity/test_gradients.py",
    ),
    "tables are left out of the norm": Fault(
        "slices/reduce.py",
        "parts += [values for _, values in reduced.tables.values()]",
        "parts += []",
        "parity/test_gradients.py",
    ),
    "l2 takes the sign": Fault(
        "slices/reduce.py",
        "place.add_(values, alpha=l2[fragment.number])",
        "place.add_(values.sign(), alpha=l2[fragment.number])",
        "parity/test_gradients.py",
    ),
    "the moving average moves by the decay": Fault(
        "slices/update.py",
        "moving.lerp_(weights[: len(moving)], 1.0 - self.options.ema)",
        "moving.lerp_(weights[: len(moving)], self.options.ema)",
        "parity/test_model_care.py",
    ),
    "the weights of train() are the result": Fault(
        "loop/engine.py",
        "ARRAYS = {CURRENT: EVALUATED, AVERAGE: EMA}",
        "ARRAYS = {AVERAGE: EMA}",
        "parity/test_validation_inside.py",
    ),
    "large tensors are cut as small ones are": Fault(
        "slices/optimizer_probe.py",
        'if all(kind == "element" for kind in kinds):',
        "if False:",
        "parity/test_optimizers.py",
    ),
    "a block is updated with the weights of the first": Fault(
        "slices/update.py",
        "weights = old.weights[start : start + block.length]",
        "weights = old.weights[: block.length]",
        "unit/slices/test_blocks.py",
    ),
    "a parameter without a gradient is stepped": Fault(
        "slices/optimizer_step.py", "if number not in absent:", "if True:", "parity/test_parity.py"
    ),
    "the step's own memory is not copied back": Fault(
        "slices/optimizer_step.py",
        "if tensor.data_ptr() != places[number]:",
        "if False:",
        "unit/slices/test_apply.py",
    ),
    "samples count once, whatever their weight": Fault(
        "replica/compute.py",
        "return float(weights.sum() if self.masses is None else self.masses @ weights.cpu())",
        "return float(len(self))",
        "parity/test_weights_of_samples.py",
    ),
    "a micro-batch loses its last row": Fault(
        "replica/compute.py",
        "rows * (i + 1) // min(count, rows)))",
        "rows * (i + 1) // min(count, rows) - (i > 0)))",
        "parity/test_gradients.py",
    ),
    "buffers keep what a trial wrote": Fault(
        "replica/compute.py", "buffer.copy_(content)", "pass", "unit/replica/test_compute.py"
    ),
    "an epoch leaves out the last batch": Fault(
        "data/epoch.py",
        "return -(-self.num_samples // self.batch_size)",
        "return max(1, self.num_samples // self.batch_size)",
        "unit/data/test_batches.py",
    ),
    "every epoch has the order of the first": Fault(
        "data/epoch.py",
        'return generator(seed, "shuffle", epoch, replica).permutation(num_rows)',
        'return generator(seed, "shuffle", 0, replica).permutation(num_rows)',
        "unit/data/test_batches.py",
    ),
    "a trigger is true one iteration late": Fault(
        "loop/triggers.py",
        "return current.iteration >= self.iterations",
        "return current.iteration > self.iterations",
        "unit/loop/test_triggers.py",
    ),
    "plateau looks at one validation less": Fault(
        "loop/triggers.py",
        "scores[: -self.patience], scores[-self.patience :]",
        "scores[: 1 - self.patience or None], scores[-self.patience :]",
        "unit/loop/test_triggers.py",
    ),
    "a gradient that is not finite is passed over": Fault(
        "loop/advance.py",
        'if skipped and options.on_nan == "raise" and state.loss_scale == 1.0:',
        "if False:",
        "unit/loop/test_progress.py",
    ),
    "the loss scale never falls": Fault(
        "loop/advance.py",
        "scale, age = next_scale(state.loss_scale, state.loss_scale_age, skipped)",
        "scale, age = next_scale(state.loss_scale, state.loss_scale_age, False)",
        "unit/loop/test_progress.py",
    ),
    "a buffer is written to while somebody may read it": Fault(
        "slab/pool.py",
        "if mapped.stamp()[0] < oldest_needed and os.fstat(mapped.fd).st_nlink:",
        "if os.fstat(mapped.fd).st_nlink:",
        "unit/slab/test_pool.py",
    ),
    "recovery forgets the last iteration": Fault(
        "engines/recovery.py",
        "for n in range(start, len(self)):",
        "for n in range(start, len(self) - 1):",
        "unit/engines/test_recovery.py",
    ),
    "what is repeated is decided anew": Fault(
        "consistency/base.py", "if repeated is not None:", "if False:", "spark/test_consistency.py"
    ),
    "a version that is still read is overwritten": Fault(
        "engines/shuffle/engine.py",
        "return self._ring[0].submission",
        "return self.newest.submission",
        "spark/test_consistency.py",
    ),
    "slices that overlap are taken for a whole": Fault(
        "slices/slice_file.py",
        "if low != position:",
        "if low > position:",
        "unit/slices/test_checkpoint_slices.py unit/checkpoint/test_checkpoint_manifest.py",
    ),
    "a checkpoint of other shapes is taken": Fault(
        "checkpoint/manifest.py",
        "elif one.shape != other.shape:",
        "elif len(one.shape) != len(other.shape):",
        "unit/checkpoint/test_checkpoint_manifest.py",
    ),
    "equal scores count as won": Fault(
        "metrics/scores.py",
        "(below + negatives / 2)",
        "(below + negatives)",
        "unit/metrics/test_ranking.py",
    ),
    "gossip averages by half": Fault(
        "consistency/gossip.py",
        "own[part].add_(difference[part], alpha=weight)",
        "own[part].add_(difference[part], alpha=weight / 2)",
        "gang/test_sums.py",
    ),
    "a rank's inner steps begin anew": Fault(
        "engines/gang/strategies/ddp.py",
        "self._kept, self._moved = self._moved.kept, None",
        "self._moved = None",
        "spark/test_diloco.py",
    ),
    "an epoch's mean counts batches alike": Fault(
        "loop/history.py",
        'record["loss"] += loss * count',
        'record["loss"] += loss',
        "unit/loop/test_history.py",
    ),
    "a skipped iteration is part of an epoch's mean": Fault(
        "loop/history.py", "if math.isfinite(loss):", "if True:", "unit/loop/test_history.py"
    ),
    "a process number that is used again holds a root": Fault(
        "slab/root.py",
        "start_time(int(mark[2])) != mark[3]",
        "not start_time(int(mark[2]))",
        "unit/slab/test_root.py",
    ),
    "a root of another user is taken": Fault(
        "slab/root.py",
        "stat.S_ISDIR(mode) and status.st_uid == os.getuid()",
        "stat.S_ISDIR(mode)",
        "unit/slab/test_root.py",
    ),
    "buffers of all replicas count alike": Fault(
        "slices/reduce.py",
        "merged.add_(difference, alpha=weight / total)",
        "merged.add_(difference, alpha=1 / len(values))",
        "unit/slices/test_reduce.py",
    ),
    "a rank of a divided model counts again": Fault(
        "slices/reduce.py",
        "single = [c for c in ordered if not c.repeats]",
        "single = ordered",
        "unit/slices/test_reduce.py",
    ),
    "what was there counts again in each sum": Fault(
        "model/flat.py", "now - before))", "now))", "unit/model/test_flat.py"
    ),
    "statistics are those of rows with weight": Fault(
        "engines/gang/strategies/summed.py",
        "return share, 0.0 if idle() else 1.0",
        "return share, 1.0 if share else 0.0",
        "gang/test_batchnorm.py",
    ),
    "what a pass makes of a buffer is not sent": Fault(
        "model/flat.py",
        "place.view(segment.shape).copy_(buffer)",
        "pass",
        "unit/model/test_flat.py",
    ),
    "what is frozen stays frozen": Fault(
        "model/preparation.py",
        '(("freeze", frozen, False), ("unfreeze", unfrozen, True))',
        '(("unfreeze", unfrozen, True), ("freeze", frozen, False))',
        "parity/test_model_care.py",
    ),
    "weights of another shape are left out": Fault(
        "model/preparation.py",
        "if name in own and value.shape != own[name].shape",
        "if strict and name in own and value.shape != own[name].shape",
        "parity/test_model_care.py",
    ),
    "classes have no weight": Fault(
        "replica/compute.py",
        "if options.class_weights is None:",
        "if True:",
        "parity/test_weights_of_samples.py",
    ),
    "all replicas draw alike": Fault(
        "replica/step.py",
        "position = (self.step.index, self.replica) +",
        "position = (self.step.index, 0) +",
        "parity/test_parity.py",
    ),
    **{name: Fault(*row) for name, row in OF_GANGS.items()},
}
