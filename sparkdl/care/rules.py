"""The rules of a trainer's fields, as data: each problem is one sentence with its remedy.

A field's rule is in its metadata, under :data:`RULE`. What fields must not have together is a row of
:data:`COMBINATIONS`.
"""

from __future__ import annotations

import copy
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from pyspark.resource import ResourceProfile
from torch import nn

from sparkdl.checkpoint import Checkpoint
from sparkdl.consistency.base import Consistency
from sparkdl.data.sampling import Sampling
from sparkdl.data.schema import check_specs
from sparkdl.errors import counted, in_quotes, kind_of, nearest, shown
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.callbacks import Callback
from sparkdl.loop.history import History
from sparkdl.loop.triggers import Trigger, max_epoch, no_trigger
from sparkdl.loop.validation import Validation
from sparkdl.metrics.named import scalar_names
from sparkdl.model.buffers import PRECISIONS, problems_of_rules
from sparkdl.model.loss import ModelLoss, inner
from sparkdl.model.recipe import problems_of_part
from sparkdl.parallel.plan import parts_of
from sparkdl.parallel.plan import problems_of as problems_of_parallel
from sparkdl.plain import is_number, is_whole, plain, plain_list

RULE = "rule"
"""The key of a field's rule in its metadata."""
Problems = Callable[[str, Any], Iterator[str]]
"""A function of the name and the value of a field."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The values that a field may have, beside None where that is its default."""

    remedy: str = ""  # after the name and the value
    kind: Any = object
    instance: bool = False  # a class is told to be none
    fits: Callable[[Any], bool] | None = None  # a value of that kind
    choices: Sequence[str] = ()
    problems: Problems | None = None  # of a value that is right so far
    plain: Callable[[Any], Any] | None = None  # makes Python's values of those of other libraries

    def broken_by(self, name: str, value: Any) -> Iterator[str]:
        """Yield the problems of a value of the field called ``name``."""
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                yield (
                    f"{name}={in_quotes(value)}: use one of {', '.join(self.choices)}."
                    f"{nearest(str(value), self.choices)}"
                )
        elif self.instance and isinstance(value, type):
            yield f"{name} is the class {value.__name__}: give an instance, {value.__name__}()."
        elif not isinstance(value, self.kind):
            yield f"{name} is {kind_of(value)}: {self.remedy}."
        elif self.fits is not None and not self.fits(value):
            yield f"{name}={shown(value)}: {self.remedy}."
        elif self.problems is not None:
            yield from self.problems(name, value)


def make_fields_plain(made: Any) -> None:
    """Replace fields of a dataclass, even a frozen one, by plain values, as their rules say."""
    for one in fields(made):
        rule = one.metadata.get(RULE)
        if rule is not None and rule.plain is not None:
            object.__setattr__(made, one.name, rule.plain(getattr(made, one.name)))


def problems_of_fields(made: Any) -> Iterator[str]:
    """Yield the problems of the fields of a dataclass, one after another."""
    for one in fields(made):
        rule, value = one.metadata.get(RULE), getattr(made, one.name, None)
        if rule is not None and not (value is None and one.default is None):
            yield from rule.broken_by(one.name, value)


def rule(remedy: str = "", **how: Any) -> dict[str, Rule]:
    """Return the metadata of a field with a rule."""
    return {RULE: Rule(remedy=remedy, **how)}


def _is_penalty(value: Any) -> bool:
    strengths = value.values() if isinstance(value, Mapping) else (value,)
    return all(is_number(strength) and strength >= 0 for strength in strengths)


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _not_built(name: str, optimizer: Any) -> Iterator[str]:
    if isinstance(optimizer, torch.optim.Optimizer):
        yield (
            f"{name} is already built: give a recipe for it instead, "
            f"partial(torch.optim.{type(optimizer).__name__}, lr=...)."
        )


def _column_names(name: str, value: Any) -> Iterator[str]:
    names = [value] if isinstance(value, str) else value
    if name == "features" and isinstance(value, Mapping):
        names = list(value.values())
        if not _are_names([*value, *names]) or not all(key.isidentifier() for key in value):
            yield (
                f"features={shown(value)}: give a mapping from each parameter of forward to the name "
                "of a column."
            )
            return
    if name == "label" and value is None:
        return
    if not _are_names(names):
        yield f"{name}={shown(value)}: give a column name, or a list of names."
    elif name == "features" and not names:
        yield "features is empty: name at least one column."


BALANCED = "balanced"
"""The class weights that the rows of the data decide."""


def _class_weights(name: str, weights: Any) -> Iterator[str]:
    if isinstance(weights, str) and weights == BALANCED:
        return
    remedy = (
        'give "balanced", a list with the weight of each class, or a mapping {class: weight}, all of '
        "at least 0."
    )
    if isinstance(weights, (str, bytes)) or not isinstance(weights, (Mapping, list, tuple)):
        yield f"{name} is {kind_of(weights)}: {remedy}"
        return
    values = list(weights.values()) if isinstance(weights, Mapping) else list(weights)
    classes = list(weights) if isinstance(weights, Mapping) else []
    if not values or not all(is_number(value) and value >= 0 for value in values):
        yield f"{name}={shown(weights)}: {remedy}"
    elif not all(is_number(c) and c >= 0 and c == int(c) for c in classes):
        yield f"{name}={shown(weights)}: classes are whole numbers, starting at 0."
    elif not any(values) and (not classes or len(classes) == max(classes) + 1):
        yield (
            f"{name}={shown(weights)}: no sample would count. Give at least one class a weight above 0."
        )


def _compile_options(name: str, options: Any) -> Iterator[str]:
    if isinstance(options, Mapping):
        try:
            torch.compile(nn.Identity(), **options)
        except Exception as error:
            reason = textwrap.shorten(str(error), 160, placeholder="...").rstrip(".")
            yield f"{name}={shown(options)}: torch.compile does not take these options ({reason})."


def _each_callback(name: str, callbacks: Any) -> Iterator[str]:
    for callback in callbacks:
        if isinstance(callback, type):
            yield f"callback {callback.__name__} is a class: give an instance of it."
        elif not isinstance(callback, Callback):
            yield f"callback {shown(callback)} is not a sparkdl.Callback."


def trigger(example: str, *made_by: Any) -> dict[str, Rule]:
    """Return the metadata of a field that holds a trigger."""

    def check(name: str, value: Any) -> Iterator[str]:
        if not isinstance(value, Trigger):
            yield no_trigger(f"{name}={{}}", value, example, *made_by)

    return {RULE: Rule(problems=check)}


AUTO = "auto"
"""The word with which a fit decides a field by a plan."""
ENGINES = ("local", "shuffle", "gang")
COUNT = rule("give a whole number of at least 1", fits=lambda v: is_whole(v, 1), plain=plain)
FLAG = rule("give True or False", kind=bool, plain=plain)
POSITIVE = rule(
    "give a number above 0, or None", fits=lambda v: is_number(v) and v > 0, plain=plain
)
DECAY = rule(
    "give a decay between 0 and 1, such as 0.999, or None",
    fits=lambda v: is_number(v) and 0 < v < 1,
    plain=plain,
)
PENALTY = rule(
    "give a number of at least 0, or a mapping of patterns to such numbers",
    fits=_is_penalty,
    plain=plain,
)
SEED = rule(
    "give a whole number from 0 to 2**63 - 1",
    fits=lambda v: is_whole(v, 0) and v < 2**63,
    plain=plain,
)
PRECISION = rule(choices=tuple(PRECISIONS))
PATTERNS = rule(
    'give a list of names or patterns, such as ["encoder.*"]', fits=_are_names, plain=plain_list
)
COLUMNS = rule(problems=_column_names, plain=plain_list)
SAMPLING = rule(
    'give sparkdl.Balanced("label"), sparkdl.Weighted("column"), or None',
    kind=Sampling,
    instance=True,
)
CLASS_WEIGHTS = rule(problems=_class_weights, plain=plain)
OPTIMIZER = rule(
    "give a torch.optim class, or a partial of one such as partial(torch.optim.Adam, lr=1e-3)",
    kind=(Callable, torch.optim.Optimizer, Mapping),
    problems=_not_built,
)
OUTPUT = rule(problems=lambda name, value: iter(problems_of_part(value)), plain=plain)
BUFFERS = rule(problems=lambda name, value: problems_of_rules(value, name))
COMPILE = rule(
    "give True, or a mapping of torch.compile's options",
    kind=(bool, Mapping),
    problems=_compile_options,
)
CALLBACKS = rule(
    "give a list of sparkdl.Callback objects", kind=(list, tuple), problems=_each_callback
)
CONSISTENCY = rule(
    "give a consistency model, such as sparkdl.StaleSynchronous(staleness=1), or None",
    kind=Consistency,
    instance=True,
)
MODEL = rule("give a function that builds a torch.nn.Module, or a module", kind=Callable)
LOSS = rule(
    "give a function of (output, target), such as torch.nn.MSELoss(), or sparkdl.ModelLoss() for a "
    "model that computes its own",
    kind=Callable,
    instance=True,
)
STEP = rule("give a function of (module, batch) that returns the loss", kind=Callable)
SCHEDULE = rule(
    "give a partial of a torch.optim.lr_scheduler class, such as partial(StepLR, step_size=10)",
    kind=Callable,
)
SCHEDULE_PER = rule(choices=("iteration", "epoch"))
SCHEDULE_METRIC = rule("give the name of a metric of the validation", kind=str)
WEIGHT = rule("give the name of a column", kind=str)
AUGMENT = rule("give a function of (*features, rng)", kind=Callable)
ENGINE = rule(choices=(*ENGINES, AUTO))
REPLICAS = rule(
    "give a whole number of at least 1",
    fits=lambda v: is_whole(v, 1) or (isinstance(v, str) and v == AUTO),
    plain=plain,
)
MESH = rule(plain=plain)
RESOURCE_PROFILE = rule("give a pyspark.resource.ResourceProfile, or None", kind=ResourceProfile)
ON_NAN = rule(choices=("raise", "skip"))
HANDLE_INVALID = rule(choices=("error", "skip", "keep"))
COMPRESSION = rule(
    "give sparkdl.TopK(), sparkdl.PowerSGD(), a function of a sparkdl.GradBucket, or None",
    kind=Callable,
    instance=True,
)
WEIGHTS = rule(
    "give a state_dict, or the path of a safetensors file", kind=(Mapping, str, os.PathLike)
)
VALIDATION = rule("give sparkdl.Validation(data, metrics=[...])", kind=Validation)
CHECKPOINT = rule('give sparkdl.Checkpoint("path")', kind=Checkpoint)
STOP = trigger("sparkdl.max_epoch(10)", max_epoch)
HISTOGRAMS = trigger("sparkdl.every(100)")


def _is_gang(trainer: Any) -> bool:
    return isinstance(trainer.engine, str) and trainer.engine == "gang"


def _takes_local_steps(trainer: Any) -> bool:
    return is_whole(trainer.local_steps, 1) and trainer.local_steps > 1


def _labels_of_model(trainer: Any) -> ModelLoss | None:
    """Return the loss, if the model computes it."""
    own = inner(trainer.loss) if trainer.step is None else None
    return own if isinstance(own, ModelLoss) else None


COMBINATIONS: tuple[tuple[Callable[[Any], object], str], ...] = (
    (
        lambda t: _takes_local_steps(t) and t.wire != "fp32",
        'wire="{t.wire}" with local_steps={t.local_steps}: with local steps, replicas send weights and '
        'optimizer state, which must not be rounded. Use wire="fp32".',
    ),
    (
        lambda t: _takes_local_steps(t) and t.compression is not None,
        "compression with local_steps={t.local_steps}: with local steps, replicas send weights and "
        "optimizer state, not gradients. Leave one of the two out.",
    ),
    (
        lambda t: t.loss is None and t.step is None,
        "neither loss= nor step= is given: give loss=, such as torch.nn.MSELoss(), or step=, a "
        "function of module and batch that returns the loss.",
    ),
    (
        lambda t: t.loss is not None and t.step is not None,
        "loss= and step=: give loss=, such as torch.nn.MSELoss(), or step=, a function of module and "
        "batch that returns the loss.",
    ),
    *(
        (
            lambda t, name=name: (
                t.loss is None and t.step is not None and getattr(t, name) is not None
            ),
            f"step= with {name}: a step weighs its rows itself. Leave {name} out; a column of weights "
            "can be one of the labels, and the step returns (sum, count).",
        )
        for name in ("weight", "class_weights")
    ),
    (
        lambda t: _labels_of_model(t) is not None and not t.label_columns,
        "loss=ModelLoss() with label=None: a model that computes its own loss needs labels. Name the "
        "label column.",
    ),
    *(
        (
            lambda t, name=name, other=other: (
                _labels_of_model(t) is not None
                and getattr(t, name) is not None
                and (other is None or getattr(t, other) is None)
            ),
            f"loss=ModelLoss() with {name}: the model returns one loss for all rows together. Leave "
            "one of the two out, or give a loss that is computed from the model's output.",
        )
        for name, other in (("weight", None), ("class_weights", "weight"))
    ),
    (
        lambda t: _is_gang(t) and _takes_local_steps(t),
        'local_steps={t.local_steps} with engine="gang": its ranks do not average optimizer state. Use '
        'engine="shuffle", or consistency=sparkdl.DiLoCo(inner_steps=...).',
    ),
    (
        lambda t: _is_gang(t) and t.slices is not None,
        'slices={t.slices} with engine="gang": the strategy decides how the state is divided. Leave '
        "slices out.",
    ),
    (
        lambda t: (
            not _is_gang(t) and isinstance(t.checkpoint, Checkpoint) and t.checkpoint.asynchronous
        ),
        'Checkpoint(asynchronous=True) with engine="{t.engine}": only the ranks of a gang write '
        'checkpoints while they train. Use engine="gang", or leave asynchronous out.',
    ),
    (
        lambda t: t.sync_batchnorm is True and t.engine != "gang",
        'sync_batchnorm=True with engine="{t.engine}": only the replicas of a gang can communicate '
        'during a forward pass. Use engine="gang", or leave it out.',
    ),
    *(
        (
            lambda t, name=name, alone=alone: (
                t.sync_batchnorm is True and getattr(t, name) != alone
            ),
            f"sync_batchnorm=True does not go with {name}: leave one of the two out.",
        )
        for name, alone in (("compression", None), ("accumulate", 1))
    ),
    (
        lambda t: is_whole(t.min_ranks, 1) and t.engine != "gang",
        'min_ranks={t.min_ranks} with engine="{t.engine}": only a gang needs task slots for all '
        'replicas at once. Use engine="gang", or leave it out.',
    ),
)
"""Combinations of fields that a trainer ``t`` must not have, each with the sentence that says so."""


def decided_later(trainer: Any) -> list[str]:
    """Return the fields of a trainer that a fit decides."""
    names = ("engine", "strategy", "replicas")
    return [n for n in names if isinstance(v := getattr(trainer, n), str) and v == AUTO]


def settled_forms(trainer: Any) -> Iterator[Any]:
    """Yield the forms of a trainer without "auto", the default first; they are not checked."""
    later = decided_later(trainer)
    for engine in ("shuffle", "gang") if "engine" in later else (trainer.engine,):
        settled = copy.copy(trainer)
        given = {"engine": engine, "strategy": "ddp", "replicas": None}
        for name in later:
            object.__setattr__(settled, name, given[name])
        yield settled


def problems_of(trainer: Any) -> Iterator[str]:
    """Yield every problem of a trainer that can be found without the data.

    One that leaves fields to a fit is right if one of its forms is.
    """
    if decided_later(trainer):
        tried = [list(problems_of(form)) for form in settled_forms(trainer)]
        yield from next((problems for problems in tried if not problems), tried[0])
        return
    yield from problems_of_fields(trainer)
    parallel = list(problems_of_parallel(trainer.strategy, trainer.mesh))
    yield from parallel
    columns = [*_column_names("features", trainer.features), *_column_names("label", trainer.label)]
    if not columns:
        features, labels = trainer.feature_columns, trainer.label_columns
        yield from check_specs(trainer.columns, features, labels, trainer.weight)
    for together, sentence in COMBINATIONS:
        if not (columns and "label" in sentence) and together(trainer):
            yield sentence.format(t=trainer)
    own = _labels_of_model(trainer)
    if own is not None and own.names is not None and not columns:
        count = len(trainer.label_columns)
        if count not in (0, len(own.names)):
            yield (
                f"loss=ModelLoss(labels={shown(own.labels)}) with {count} label columns: give a list "
                "with one keyword for each label, or None to pass the labels after the inputs."
            )
    if isinstance(trainer.consistency, Consistency):
        wrong = list(trainer.consistency.problems())
        name = type(trainer.consistency).__name__
        yield from (f"consistency={name}: {problem}" for problem in wrong)
        if not wrong:
            yield from trainer.consistency.problems_with(trainer)
    if not columns:
        yield from _equal_names(trainer)
    if _is_gang(trainer) and is_whole(trainer.min_ranks, 1) and is_whole(trainer.replicas, 1):
        yield from problems_of_min_ranks(trainer.min_ranks, trainer.replicas)
    yield from _unknown_metrics(trainer)
    if _is_gang(trainer) and not parallel:
        for part in parts_of(trainer.strategy, trainer.mesh).values():
            yield from part.problems_with(trainer)


def problems_of_start(
    resume: Any, start: Any = None, optimizer_state: Any = None, replay: Any = None
) -> Iterator[str]:
    """Yield the problems of the arguments that say how a run begins."""
    if not isinstance(resume, (str, os.PathLike, type(None))):
        yield (
            f'resume is {kind_of(resume)}: give "latest", or the path of a checkpoint or of '
            "a folder of them."
        )
    if not isinstance(start, (TrainedModel, type(None))):
        yield (
            f"start is {kind_of(start)}: give what fit returned, or sparkdl.load(path). A "
            "state_dict or a file is weights= of the trainer."
        )
    if not isinstance(optimizer_state, (bool, type(None))):
        yield f"optimizer_state={shown(optimizer_state)}: give True, False or None."
    if not isinstance(replay, (History, type(None))):
        yield f"replay is {kind_of(replay)}: give the history of a run, trained.history."


def _equal_names(trainer: Any) -> Iterator[str]:
    """Yield the problem of two tensors that have one name for the model or a step."""
    try:
        names = [*trainer.input_names, *(trainer.label_columns if trainer.step else ())]
    except (AttributeError, TypeError, ValueError):  # a rule of a field says what is wrong
        return
    if trainer.keywords or trainer.step is not None:
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            yield (
                f"two tensors have the name {', '.join(twice)}: give other keywords in "
                "features={...}, or rename a column."
            )


def problems_of_min_ranks(min_ranks: int | None, replicas: int) -> Iterator[str]:
    """Yield the problem of a ``min_ranks`` that exceeds the number of replicas."""
    if min_ranks is not None and min_ranks > replicas:
        yield (
            f"min_ranks={min_ranks} with {counted(replicas, 'replica')}: a gang uses at most one "
            f"task slot for each replica. Give at most {replicas}."
        )


def _unknown_metrics(trainer: Any) -> Iterator[str]:
    """Yield the metrics that triggers need, and that the validation does not have."""
    known = {"loss"}
    if isinstance(trainer.validation, Validation):
        known |= {*scalar_names(trainer.validation.metrics)}
    triggers = {"stop": trainer.stop, "histograms": trainer.histograms}
    for name in ("validation", "checkpoint"):
        triggers[f"{name}.every"] = getattr(getattr(trainer, name), "every", None)
    for where, trigger in triggers.items():
        for metric in sorted(trigger.metrics()) if isinstance(trigger, Trigger) else ():
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
