"""The whole of ``fit`` without a cluster, and plain PyTorch on the same global batches.

:func:`fit_here` is ``Trainer.fit`` with ``engine="local"``; Spark would only bring the rows to this
process, so they are handed over as lists, one a partition. :func:`fit_there` is that of the shuffle
engine. :func:`plainly` trains one module on each global batch as a whole, and :func:`copies` as many as
there are replicas, each on its part.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
import without_spark
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl.data.epoch import EpochPlan, derive_seed, permutation
from sparkdl.data.sampling import Draws
from sparkdl.engines.local.engine import LocalEngine
from sparkdl.engines.shuffle.engine import ShuffleEngine
from sparkdl.model.flat import Layout, layout_of
from sparkdl.model.recipe import Recipe
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import to_tensors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH, CLASSES, BATCH_SIZE, ITERATIONS = 6, 3, 8, 9

CUTS = [((43,), 5), ((40, 3), 1), ((30, 2, 0, 11), 3)]
"""Rows of each partition (M of them), and N. 43 rows are six batches of 8, the last one short."""

Tensors = dict[str, torch.Tensor]


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Smooth, so that no gradient is exactly or nearly zero and Adam's steps are well defined."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16, dtype=dtype), nn.Tanh(), nn.Linear(16, CLASSES, dtype=dtype)
    )


def normed() -> nn.Module:
    """With buffers."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()


class Centred(nn.Module):
    """A running mean that a single row has too, unlike batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.2)
        return x - self.mean


class Parts(without_spark.Parts):
    """Samples in partitions."""

    @staticmethod
    def of(
        sizes: Sequence[int],
        make: Callable[[np.random.Generator], Any] | None = None,
        seed: int = 0,
    ) -> Parts:
        """``make(generator)``: a record."""
        generator = np.random.default_rng([seed, *sizes])
        make = make or classified
        return Parts([[make(generator) for _ in range(size)] for size in sizes])


def classified(generator: np.random.Generator) -> sparkdl.Sample:
    """Numbers and a class."""
    return sparkdl.Sample(generator.normal(size=WIDTH), int(generator.integers(CLASSES)))


def weighted(generator: np.random.Generator) -> sparkdl.Sample:
    """Likewise, with a weight: one in five is 0."""
    sample = classified(generator)
    weight = 0.0 if generator.random() < 0.2 else float(generator.gamma(2.0))
    return replace(sample, weight=weight)


def trainer_of(sizes: Sequence[int], slices: int = 1, **changes: Any) -> sparkdl.Trainer:
    values: dict[str, Any] = {
        "model": mlp,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=1e-2),
        "batch_size": BATCH_SIZE,
        "replicas": len(sizes),
        "slices": slices,
        "engine": "local",
        "stop": sparkdl.max_iteration(ITERATIONS),
        "seed": 3,
    }
    return sparkdl.Trainer(**{**values, **changes})


class Notes(sparkdl.Callback):
    """The state after every iteration."""

    def __init__(self) -> None:
        self.states: list[sparkdl.TrainState] = []

    def on_iteration_end(self, trainer: sparkdl.Trainer, state: sparkdl.TrainState) -> None:
        self.states.append(state)


@dataclass
class Seen:
    """A run: the flat vector and every tensor by name after each iteration, states, the result."""

    flats: list[torch.Tensor] = field(default_factory=list)
    steps: list[Tensors] = field(default_factory=list)
    states: list[sparkdl.TrainState] = field(default_factory=list)
    trained: Any = None

    @property
    def losses(self) -> list[float]:
        return [state.loss for state in self.states]


def fit_here(trainer: sparkdl.Trainer, parts: Parts, **how: Any) -> Seen:
    """``trainer.fit(parts)`` on the local engine, watched."""
    with without_spark.without_spark():
        return _watched(LocalEngine, trainer, parts, **how)


def fit_there(spark: SparkSession, trainer: sparkdl.Trainer, parts: Parts) -> Seen:
    """The same on the shuffle engine, where the partitions are those of an RDD."""
    records = spark.sparkContext.parallelize(parts.records, len(parts.records)).flatMap(list)
    return _watched(ShuffleEngine, replace(trainer, engine="shuffle"), records)


def _watched(kind: Any, trainer: sparkdl.Trainer, data: Any, **how: Any) -> Seen:
    seen, notes, original = Seen(), Notes(), kind.run
    layout = layout_of(recipe_of(trainer).build())

    def step(self: Any, iteration: Any, then: Any = ()) -> Any:
        result = original(self, iteration)
        seen.flats.append(self.weights().clone())
        seen.steps.append(by_name(layout, seen.flats[-1]))
        return result

    trainer = replace(trainer, callbacks=[*trainer.callbacks, notes])
    seen.states = notes.states
    with mock.patch.object(kind, "run", step):
        seen.trained = trainer.fit(data, **how)
    return seen


def recipe_of(trainer: sparkdl.Trainer) -> Recipe:
    return Recipe(
        trainer.model,
        trainer.loss,
        trainer.optimizer,
        trainer.seed,
        frozen=tuple(trainer.freeze),
        unfrozen=tuple(trainer.unfreeze),
    )


def by_name(layout: Layout, flat: torch.Tensor) -> Tensors:
    """Parameters and buffers out of a flat vector."""
    tensors = {}
    for segment in layout.segments:
        values = flat[segment.start : segment.stop]
        if segment.kind == "exact":
            nbytes = math.prod(segment.shape) * segment.dtype.itemsize
            values = values.contiguous().view(torch.uint8)[:nbytes].view(segment.dtype)
        tensors[segment.name] = values.view(segment.shape)
    return tensors


@dataclass
class Part:
    """Some rows: inputs, targets, weights (None: none)."""

    inputs: list[torch.Tensor]
    targets: list[torch.Tensor]
    weights: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def __getitem__(self, rows: slice) -> Part:
        weights = None if self.weights is None else self.weights[rows]
        return Part([t[rows] for t in self.inputs], [t[rows] for t in self.targets], weights)


def draws_of(trainer: sparkdl.Trainer, parts: Parts) -> Draws | None:
    """How replicas draw their rows, from counts of these."""
    how, field = trainer.sampling, parts.num_features + parts.num_labels
    if how is None:
        return None
    fields = [np.zeros(0, np.int64) if rows is None else rows[field] for rows in parts.rows]
    return how.draws(field, [how.tally(field).of(values) for values in fields])


def parts_of(trainer: sparkdl.Trainer, parts: Parts, t: int) -> list[Part | None]:
    """What each replica works on in iteration ``t``; None where it has no row."""
    draws = draws_of(trainer, parts)
    counts = parts.counts if draws is None else draws.counts
    plan = EpochPlan(counts, trainer.batch_size * trainer.local_steps)
    epoch, batch = divmod(t, plan.num_iterations)
    found: list[Part | None] = []
    for m, (start, stop) in enumerate(plan.rows(batch)):
        rows = parts.rows[m]
        if rows is None or start == stop:
            found.append(None)
            continue
        if draws is None:
            order = permutation(trainer.seed, epoch, m, parts.counts[m])[start:stop]
        else:
            here: Any = SimpleNamespace(values=rows.__getitem__)
            order = draws.order(here, trainer.seed, epoch, m)[start:stop] % parts.counts[m]
        tensors = to_tensors([column[order] for column in rows], torch.device("cpu"))
        end = parts.num_features + parts.num_labels
        weights = tensors[-1] if trainer.weight is not None else None
        found.append(
            Part(tensors[: parts.num_features], tensors[parts.num_features : end], weights)
        )
    return found


def whole(trainer: sparkdl.Trainer, parts: Parts, t: int) -> Part:
    """The global batch of iteration ``t``."""
    pieces = [part for part in parts_of(trainer, parts, t) if part is not None]
    weights = [p.weights for p in pieces if p.weights is not None]
    return Part(
        [torch.cat(list(c)) for c in zip(*(p.inputs for p in pieces), strict=True)],
        [torch.cat(list(c)) for c in zip(*(p.targets for p in pieces), strict=True)],
        torch.cat(weights) if weights else None,
    )


Loss = Callable[[nn.Module, Part], torch.Tensor]


def begun(trainer: sparkdl.Trainer, loss: Loss | None) -> tuple[Recipe, nn.Module, Loss]:
    """Return the trainer's recipe, its module in training mode, and ``loss`` or the trainer's own."""
    recipe = recipe_of(trainer)
    module = copy.deepcopy(recipe.build()).train()
    return recipe, module, loss or partial(plain_loss, trainer)


def plain_loss(trainer: sparkdl.Trainer, module: nn.Module, part: Part) -> torch.Tensor:
    return trainer.loss(module(*part.inputs), *part.targets)


def clipped(trainer: sparkdl.Trainer, module: nn.Module) -> float | None:
    """Clip the gradients as torch does, by the trainer's fields; return their norm before that."""
    if trainer.clip_value is not None:
        nn.utils.clip_grad_value_(module.parameters(), trainer.clip_value)
    if trainer.clip_norm is None:
        return None
    return float(nn.utils.clip_grad_norm_(module.parameters(), trainer.clip_norm))


def plainly(
    trainer: sparkdl.Trainer,
    parts: Parts,
    loss: Loss | None = None,
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] | None = None,
    counts: Callable[[Part], bool] = bool,
    norms: list[float | None] | None = None,
) -> tuple[list[Tensors], list[float]]:
    """Plain PyTorch: tensors by name, of ``eval()`` if the optimizer has it, and loss after each
    iteration. There is no step, and no loss, where nothing in a global batch ``counts``. ``norms``:
    to note those of the gradients."""
    recipe, module, loss = begun(trainer, loss)
    many = optimizers(module) if optimizers else [recipe.build_optimizer(module)]
    schedules = [trainer.schedule(one) for one in many if trainer.schedule]
    trains = [getattr(one, "train", int) for one in many]
    evaluates = [getattr(one, "eval", int) for one in many]
    steps, losses, norms = [], [], [] if norms is None else norms
    with one_thread():
        for t in range(ITERATIONS):
            part, value = whole(trainer, parts, t), torch.tensor(math.nan)
            if counts(part):
                for train in trains:
                    train()
                module.zero_grad(set_to_none=True)
                value = loss(module, part)
                value.backward()
                norms.append(clipped(trainer, module))
                for one in [*many, *schedules]:
                    one.step()
                for evaluate in evaluates:
                    evaluate()
            steps.append(snapshot(module))
            losses.append(float(value.detach()))
    return steps, losses


def copies(
    trainer: sparkdl.Trainer,
    parts: Parts,
    loss: Loss | None = None,
    counts: Callable[[Part], bool] = bool,
    sent: Callable[[torch.Tensor, int, int, int], torch.Tensor] = lambda gradient, *_: gradient,
) -> tuple[list[Tensors], list[float]]:
    """Plain PyTorch: M copies of the module, each on its part of the global batch.

    Gradients and running statistics are averaged by sample count, and other buffers follow the rules
    of their module. Random draws are seeded as the semantics say. There is no step where
    nothing in a global batch ``counts``. ``sent``: what is averaged of a gradient, in which iteration,
    of which replica and parameter.
    """
    recipe, module, loss = begun(trainer, loss)
    optimizer = recipe.build_optimizer(module)
    steps, losses = [], []
    with one_thread():
        for t in range(ITERATIONS):
            found = {m: p for m, p in enumerate(parts_of(trainer, parts, t)) if p is not None}
            total, mean, many = sum(map(len, found.values())), 0.0, []
            for m, part in found.items() if counts(whole(trainer, parts, t)) else ():
                live = copy.deepcopy(module)
                live.zero_grad(set_to_none=True)
                with seeded(derive_seed(trainer.seed, "forward", t, m)):
                    value = loss(live, part)
                    value.backward()
                for n, p in enumerate(live.parameters()):
                    p.grad = None if p.grad is None else sent(p.grad, t, m, n)
                many.append((len(part) / total, live))
                mean += float(value.detach()) * len(part) / total
            if many:
                _average(module, many, derive_seed(trainer.seed, "update", t))
                clipped(trainer, module)
                optimizer.step()
            steps.append(snapshot(module))
            losses.append(mean if many else math.nan)
    return steps, losses


@torch.no_grad()
def _average(module: nn.Module, many: list[tuple[float, nn.Module]], seed: int) -> None:
    for name, parameter in module.named_parameters():
        gradients = [(w, live.get_parameter(name).grad) for w, live in many]
        given = [grad * w for w, grad in gradients if grad is not None]
        parameter.grad = sum(given) if given else None
    for name, buffer in module.named_buffers():
        path, _, own = name.rpartition(".")
        rules = getattr(module.get_submodule(path), "sparkdl_buffers", {})
        rule = rules.get(own, "mean" if own.startswith("running_") else "first")
        values, weights = [live.get_buffer(name) for _, live in many], [w for w, _ in many]
        if rule == "mean":
            buffer.copy_(sum(v * w for v, w in zip(values, weights, strict=True)))
        elif callable(rule):
            with seeded(seed):
                buffer.copy_(rule(torch.stack(values)) if len(values) > 1 else values[0])
        else:
            stacked = torch.stack(values)
            merged = {
                "first": lambda s: s[0],
                "min": lambda s: s.amin(0),
                "max": lambda s: s.amax(0),
                "sum": lambda s, b=buffer: b + (s - b).sum(0),
            }[rule]
            buffer.copy_(merged(stacked))


def several_steps(
    trainer: sparkdl.Trainer,
    parts: Parts,
    loss: Loss | None = None,
    mass: Callable[[Part], float] = len,
) -> tuple[list[Tensors], list[float]]:
    """Plain PyTorch: each replica takes its own steps from one state; weights are then averaged by the
    ``mass`` of the parts, and the moments of those that had a gradient."""
    recipe, module, loss = begun(trainer, loss)
    optimizer = recipe.build_optimizer(module)
    train, evaluate = (getattr(optimizer, name, int) for name in ("train", "eval"))
    train()
    steps, losses = [], []
    with one_thread():
        for t in range(ITERATIONS):
            found = [part for part in parts_of(trainer, parts, t) if part is not None]
            total, mean, many = sum(map(mass, found)), 0.0, []
            for part in found:
                live = copy.deepcopy(module)
                own = recipe.build_optimizer(live)
                own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                k, rows, used = trainer.local_steps, len(part), set()
                for j in range(k):
                    fragment = part[rows * j // k : rows * (j + 1) // k]
                    if not mass(fragment):
                        continue
                    own.zero_grad(set_to_none=True)
                    value = loss(live, fragment)
                    mean += float(value.detach()) * mass(fragment) / total
                    value.backward()
                    clipped(trainer, live)
                    used |= {n for n, p in enumerate(live.parameters()) if p.grad is not None}
                    own.step(lambda value=value: value)
                many.append((mass(part) / total, live, own, used))
            with torch.no_grad():
                for name, tensor in tensors_of(module).items():
                    tensor.copy_(sum(tensors_of(live)[name] * w for w, live, _, _ in many))
            _average_moments(optimizer, [(w, own, used) for w, _, own, used in many])
            evaluate()
            steps.append(snapshot(module))
            train()
            losses.append(mean)
    return steps, losses


def _average_moments(
    optimizer: torch.optim.Optimizer, many: list[tuple[float, torch.optim.Optimizer, set[int]]]
) -> None:
    """Average the moments of each parameter over those that used it; step counts are the first's."""
    state = optimizer.state_dict()
    state["param_groups"] = many[0][1].state_dict()["param_groups"]
    for number in {number for *_, used in many for number in used}:
        users = [
            (w, own.state_dict()["state"].get(number, {}))
            for w, own, used in many
            if number in used
        ]
        share, first = sum(w for w, _ in users), users[0][1]
        state["state"][number] = {
            name: sum(its[name] * w / share for w, its in users)
            if torch.is_tensor(value) and value.ndim
            else value
            for name, value in first.items()
        }
    optimizer.load_state_dict(state)


def tensors_of(module: nn.Module) -> Tensors:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def snapshot(module: nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors_of(module).items()}


def assert_close(seen: list[Tensors], wanted: list[Tensors], tolerance: float = 1e-11) -> None:
    """Norm of the difference by norm, of every tensor after every iteration."""
    assert len(seen) == len(wanted)
    for t, (left, right) in enumerate(zip(seen, wanted, strict=True)):
        assert left
        assert left.keys() <= right.keys()
        for name, tensor in left.items():
            error = float((tensor.double() - right[name].double()).norm())
            size = float(right[name].double().norm())
            assert error <= tolerance * max(size, 1e-3), (t + 1, name, error / max(size, 1e-3))


def worst_error(seen: list[Tensors], wanted: list[Tensors]) -> float:
    """The largest relative error over all steps and tensors.

    Two measures: the norm of the difference by the norm, and the worst element by the largest one.
    Tensors that are not floating must be equal.
    """
    worst = 0.0
    for left, right in zip(seen, wanted, strict=True):
        assert left
        assert left.keys() <= right.keys()
        for name, tensor in left.items():
            if not tensor.is_floating_point():
                assert torch.equal(tensor, right[name]), name
                continue
            scale, difference = right[name].double(), tensor.double() - right[name].double()
            if not difference.isfinite().all():
                return math.inf
            if difference.any():
                by_element = difference.abs().max() / scale.abs().max()
                worst = max(worst, float(difference.norm() / scale.norm()), float(by_element))
    return worst


def assert_same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """The flat vectors after each iteration are equal to the last bit."""
    for t, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"iteration {t + 1} differs"


def as_plain_torch(
    trainer: sparkdl.Trainer,
    parts: Parts,
    *args: Any,
    reference: Callable[..., tuple[list[Tensors], list[float]]] = plainly,
    tolerance: float = 1e-11,
    **how: Any,
) -> tuple[Seen, list[Tensors]]:
    """Fit, and train as ``reference`` does: tensors and losses of every iteration are the same."""
    seen = fit_here(trainer, parts)
    steps, losses = reference(trainer, parts, *args, **how)
    assert_close(seen.steps, steps, tolerance)
    assert seen.losses == pytest.approx(losses, rel=1e-11, nan_ok=True)
    return seen, steps


def differ(left: list[Tensors], right: list[Tensors]) -> bool:
    """Whether the last iteration's tensors are far apart: that a feature does something."""
    return any(
        float((left[-1][name] - right[-1][name]).abs().max()) > 1e-5
        for name in left[-1]
        if left[-1][name].is_floating_point() and left[-1][name].numel()
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As in a task with one core: the number of threads changes the bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
