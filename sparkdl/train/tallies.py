"""Counts of the rows in place, which decide how they are drawn, and the weights of classes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

import numpy as np

from sparkdl.data.samples import SampleSet
from sparkdl.data.sampling import MOST_VALUES, Tallies, Tally, counts_of
from sparkdl.engines.gang.rank import frames_of
from sparkdl.errors import DataError
from sparkdl.gang.rank_group import StartableGroup
from sparkdl.gang.rank_task import RankContext
from sparkdl.spark.frames import stage_name
from sparkdl.train.spec import TrainerSpec


def with_draws(
    trainer: TrainerSpec, samples: SampleSet, gang: StartableGroup | None = None
) -> SampleSet:
    """Return the samples with the draws of an epoch, if the trainer asks for any.

    Where there is no driver, the samples lie with the ranks of ``gang``.
    """
    how, field = trainer.sampling, samples.num_features + samples.num_labels
    if how is None:
        return samples
    return replace(samples, draws=how.draws(field, _tallies(how.tally(field), samples, gang)))


def balanced_weights(samples: SampleSet, gang: StartableGroup | None = None) -> tuple[float, ...]:
    """Return weights with which all classes of the first label together count the same.

    They are rows / (classes * rows of the class), as in scikit-learn; a class without rows counts 1.
    """
    number = samples.num_features
    label = samples.fields[number] if samples.num_labels else None
    if label is None or label.shape or label.ragged or np.dtype(label.dtype).kind not in "iub":
        what = "there is no label" if label is None else f'"{label.name}" is {label}'
        raise DataError(
            f'class_weights="balanced" needs a label of class numbers, and {what}: cast it to int, '
            "or number the classes with pyspark.ml.feature.StringIndexer."
        )
    classes, counts = counts_of(_tallies(Tally(number), samples, gang))
    totals = counts.sum(axis=0)[classes >= 0]  # a negative number is none that a loss looks at
    classes = classes[classes >= 0].astype(np.int64)
    if not len(classes) or len(classes) > MOST_VALUES or classes[-1] > 1 << 20:
        raise DataError(
            f'class_weights="balanced": "{label.name}" has no class numbers that can be counted: they '
            f"begin at 0, and there are at most {MOST_VALUES:,}."
        )
    table = np.ones(int(classes[-1]) + 1)
    table[classes] = totals.sum() / (len(classes) * totals)
    return tuple(table.tolist())


def _tallies(tally: Tally, samples: SampleSet, gang: StartableGroup | None) -> Tallies:
    """Return the tally of each partition, wherever it lies."""
    if samples.rdd is not None:
        with stage_name(samples.rdd.ctx, "count rows to draw or to weigh"):
            return samples.rdd.ctx.runJob(samples.rdd, tally)
    if gang is not None:
        return gang.call(_TallyPart(tally), "counting rows to draw or to weigh")
    return [tally.read(handle) for handle in samples.handles]


@dataclass(frozen=True)
class _TallyPart:
    """The command that counts a rank's training rows."""

    tally: Tally

    def __call__(self, member: RankContext) -> tuple[np.ndarray, np.ndarray]:
        return self.tally.read(pickle.loads(frames_of(member.frames)[0]))
