"""A dry run on arrays, as that before a fit on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sparkdl import Masked
from sparkdl.care.dry_run import Division, DryRun
from sparkdl.care.first_pass import Tried
from sparkdl.data.batches import BatchSpec
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.fields import Field, SampleHandle
from sparkdl.data.ragged import Ragged, Rows
from sparkdl.data.row_errors import Adapted, BadRow
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import ValidationSet
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.recipe import Recipe
from sparkdl.parallel.plan import parallel_of


def field_of(name: str, rows: Rows) -> Field:
    padding = rows.padding if isinstance(rows, Ragged) else None
    return Field(name, str(rows.dtype), tuple(rows.shape[1:]) if padding is None else (), padding)


def samples_of(inputs: Sequence[Rows], labels: Sequence[Rows], weights: Any = None) -> SampleSet:
    rows = [*inputs, *labels, *([] if weights is None else [weights])]
    fields = tuple(field_of(f"x{i}", each) for i, each in enumerate(rows))
    weighted = weights is not None
    return SampleSet(None, (), fields, len(inputs), rows, len(labels), weighted, rows)


def dry_run(
    module: nn.Module,
    loss: Callable[..., Any],
    inputs: Sequence[Rows],
    labels: Sequence[Rows] = (),
    *,
    replicas: int = 2,
    counts: Sequence[int] = (),
    weights: Any = None,
    augment: Callable[..., Any] | None = None,
    build: Callable[[], nn.Module] | None = None,
    buffers: Mapping[str, Any] | None = None,
    validated: bool = False,
    care: bool = True,
    missing: Sequence[int] = (),
) -> Tried:
    """``missing``: the numbers of labels that are missing in a row, which no specification says."""
    options = TrainingOptions(weighted=weights is not None, buffers=buffers or {})
    recipe = Recipe(module, loss, torch.optim.SGD, 3, options, augment=augment)
    samples = samples_of(inputs, labels, weights)
    names = [samples.fields[len(inputs) + number].name for number in missing]
    notes = (Adapted(n, Masked(), BadRow(n, 5, "is NaN", "Drop it.")) for n in names)
    if missing:
        handle = SampleHandle("", (), "", 6, 0, samples.fields, adapted=tuple(notes))
        samples = replace(samples, handles=(handle,))
    how = BatchSpec(
        num_features=len(inputs), num_labels=len(labels), weighted=weights is not None, seed=3
    )
    division = Division(
        EpochPlan(tuple(counts) or (6,) * replicas, 4), None, parallel_of({}, None, replicas)
    )
    validation = ValidationSet(samples, Scorer(loss), how, 4) if validated else None
    spec = BatchSpec(**{**vars(how), "augment": augment})
    return DryRun(
        module, recipe, spec, samples, division, build or (lambda: module), validation
    ).run(care)
