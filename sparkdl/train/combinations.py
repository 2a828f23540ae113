"""Checks that a trainer's fields go together. Each problem is one sentence with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from sparkdl.checkpoint import Checkpoint
from sparkdl.consistency.base import Consistency
from sparkdl.errors import counted, nearest, shown
from sparkdl.loop.triggers import Trigger
from sparkdl.loop.validation import Validation
from sparkdl.metrics.named import resolve
from sparkdl.model.loss import ModelLoss, inner
from sparkdl.parallel.plan import parts_of


def problems_of_combinations(trainer: Any, strategies: bool) -> Iterator[str]:
    """Yield the problems of fields that do not go together.

    ``strategies``: ``strategy`` and ``mesh`` are valid by themselves.
    """
    if isinstance(trainer.local_steps, int) and trainer.local_steps > 1 and trainer.wire != "fp32":
        yield (
            f'wire="{trainer.wire}" with local_steps={trainer.local_steps}: with local steps, '
            'replicas send weights and optimizer state, which must not be rounded. Use wire="fp32".'
        )
    if (
        isinstance(trainer.local_steps, int)
        and trainer.local_steps > 1
        and trainer.compression is not None
    ):
        yield (
            f"compression with local_steps={trainer.local_steps}: with local steps, replicas send "
            "weights and optimizer state, not gradients. Leave one of the two out."
        )
    if isinstance(trainer.consistency, Consistency):
        wrong = list(trainer.consistency.problems())
        name = type(trainer.consistency).__name__
        yield from (f"consistency={name}: {problem}" for problem in wrong)
        if not wrong:
            yield from trainer.consistency.problems_with(trainer)
    yield from _of_the_loss(trainer)
    yield from _of_names(trainer)
    if isinstance(trainer.engine, str) and trainer.engine == "gang":
        yield from _of_a_gang(trainer)
    elif isinstance(trainer.checkpoint, Checkpoint) and trainer.checkpoint.asynchronous:
        yield (
            f'Checkpoint(asynchronous=True) with engine="{trainer.engine}": only the ranks of a '
            'gang write checkpoints while they train. Use engine="gang", or leave asynchronous out.'
        )
    if trainer.sync_batchnorm is True:
        yield from _of_sync_batchnorm(trainer)
    yield from _of_min_ranks(trainer)
    known = {"loss"}
    if isinstance(trainer.validation, Validation):
        known = {"loss", *(metric.name for metric in resolve(trainer.validation.metrics))}
    for name in ("stop", "histograms"):
        yield from _unknown_metrics(name, getattr(trainer, name), trainer, known)
    for name, holder in (("validation", trainer.validation), ("checkpoint", trainer.checkpoint)):
        yield from _unknown_metrics(f"{name}.every", getattr(holder, "every", None), trainer, known)
    if isinstance(trainer.engine, str) and trainer.engine == "gang" and strategies:
        for part in parts_of(trainer.strategy, trainer.mesh).values():
            yield from part.problems_with(trainer)


def _of_the_loss(trainer: Any) -> Iterator[str]:
    if (trainer.loss is None) == (trainer.step is None):
        found = "neither loss= nor step= is given" if trainer.loss is None else "loss= and step="
        yield (
            f"{found}: give loss=, such as torch.nn.MSELoss(), or step=, a function of module and "
            "batch that returns the loss."
        )
    elif trainer.step is None:
        yield from _of_model_loss(trainer)
    else:
        for name in ("weight", "class_weights"):
            if getattr(trainer, name) is not None:
                yield (
                    f"step= with {name}: a step weighs its rows itself. Leave {name} out; a column of "
                    "weights can be one of the labels, and the step returns (sum, count)."
                )


def _of_names(trainer: Any) -> Iterator[str]:
    """Yield the problem of two tensors that have one name for the model or a step."""
    try:
        names = [*trainer.input_names, *(trainer.label_columns if trainer.step else ())]
    except (AttributeError, TypeError, ValueError):  # found by the checks of the fields themselves
        return
    if trainer.keywords or trainer.step is not None:
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            yield (
                f"two tensors have the name {', '.join(twice)}: give other keywords in "
                "features={...}, or rename a column."
            )


def _of_model_loss(trainer: Any) -> Iterator[str]:
    own = inner(trainer.loss)
    if not isinstance(own, ModelLoss):
        return
    labels = trainer.label_columns
    if not labels:
        yield (
            "loss=ModelLoss() with label=None: a model that computes its own loss needs labels. "
            "Name the label column."
        )
    elif own.names is not None and len(own.names) != len(labels):
        yield (
            f"loss=ModelLoss(labels={shown(own.labels)}) with {len(labels)} label columns: give a list "
            "with one keyword for each label, or None to pass the labels after the inputs."
        )
    if trainer.weight is not None or trainer.class_weights is not None:
        given = "weight" if trainer.weight is not None else "class_weights"
        yield (
            f"loss=ModelLoss() with {given}: the model returns one loss for all rows together. "
            "Leave one of the two out, or give a loss that is computed from the model's output."
        )


def _of_a_gang(trainer: Any) -> Iterator[str]:
    if isinstance(trainer.local_steps, int) and trainer.local_steps > 1:
        yield (
            f'local_steps={trainer.local_steps} with engine="gang": its ranks do not average optimizer '
            'state. Use engine="shuffle", or consistency=sparkdl.DiLoCo(inner_steps=...).'
        )
    if trainer.slices is not None:
        yield (
            f'slices={trainer.slices} with engine="gang": the strategy decides how the state is '
            "divided. Leave slices out."
        )


def _of_sync_batchnorm(trainer: Any) -> Iterator[str]:
    if trainer.engine != "gang":
        yield (
            f'sync_batchnorm=True with engine="{trainer.engine}": only the replicas of a gang can '
            'communicate during a forward pass. Use engine="gang", or leave it out.'
        )
    for name, alone in (("compression", None), ("accumulate", 1)):
        if getattr(trainer, name) != alone:
            yield f"sync_batchnorm=True does not go with {name}: leave one of the two out."


def _of_min_ranks(trainer: Any) -> Iterator[str]:
    least = trainer.min_ranks
    if not is_count(least):
        return
    if trainer.engine != "gang":
        yield (
            f'min_ranks={least} with engine="{trainer.engine}": only a gang needs task slots for all '
            'replicas at once. Use engine="gang", or leave it out.'
        )
    elif is_count(trainer.replicas):
        yield from problems_of_min_ranks(least, trainer.replicas)


def problems_of_min_ranks(min_ranks: int | None, replicas: int) -> Iterator[str]:
    """Yield the problem of a ``min_ranks`` that exceeds the number of replicas."""
    if min_ranks is not None and min_ranks > replicas:
        yield (
            f"min_ranks={min_ranks} with {counted(replicas, 'replica')}: a gang uses at most one "
            f"task slot for each replica. Give at most {replicas}."
        )


def _unknown_metrics(where: str, trigger: Any, trainer: Any, known: set[str]) -> Iterator[str]:
    if not isinstance(trigger, Trigger):
        return
    for metric in sorted(trigger.metrics()):
        if trainer.validation is None:
            yield (
                f'{where} needs the metric "{metric}", and there is no validation: give '
                f'validation=sparkdl.Validation(data, metrics=["{metric}"]).'
            )
        elif metric not in known:
            yield (
                f'{where} needs the metric "{metric}", which the validation does not '
                f"have.{nearest(metric, known)} It has: {', '.join(sorted(known))}."
            )


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether ``value`` is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
