"""The arrays of a mini-batch, made from a mapped partition: order, augmentation, padding.

The result is a pure function of (batch_spec, partition, epoch, replica, rows), the same on every
engine.

Bucketing puts rows of similar length into one batch, which wastes little on padding. The buckets come
from windows of a random permutation, which keeps the epoch random: Khomenko et al., "Accelerating
recurrent neural network training using sequence bucketing and multi-GPU data parallelization", 2017
(https://arxiv.org/abs/1708.05604).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.data.columns.convert import masked
from sparkdl.data.epoch import RowDraws, derive_seed, generator, permutation, remembered
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Ragged, RowLengths, Rows, dense, model_inputs, padded_lengths
from sparkdl.errors import ParameterError, kind_of
from sparkdl.process.determinism import steadily

if TYPE_CHECKING:
    from sparkdl.data.partition_reader import MappedPartition
    from sparkdl.data.sampling import Draws


@dataclass(frozen=True)
class Batched:
    """A function for ``Trainer(augment=...)`` that changes all rows of a batch at once.

    It may be used as a decorator. The function gets arrays of shape (rows, ...) in place of those of
    one sample, and returns arrays with as many rows. Rows of varying length must have equal lengths
    in a batch. ``rng`` has ``random(*shape)``, ``integers(low, high, *shape)`` and ``normal(*shape)``,
    whose arrays begin with the rows: a row's numbers are the same in any batch.

    Args:
        function: The function ``(*features, rng)``, or of keywords, as ``Trainer.augment``.
    """

    function: Callable[..., Any]

    def __call__(self, *features: Any, **named: Any) -> Any:
        return self.function(*features, **named)


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Constants of a run that say how the fields of samples become the arrays of a mini-batch.

    The fields of a sample are ``num_features`` inputs, ``num_labels`` labels, the field that decides
    about ``draws`` and, if ``weighted``, the weight. The padding rule of a field of varying length is
    in the field itself.
    """

    num_features: int
    num_labels: int
    weighted: bool = False
    inputs: tuple[str, ...] = ()  # the model's keywords for the features; (): positional
    augment: Callable[..., Any] | None = None  # of one sample as stored, before padding
    bucketing: int | None = None  # rows of a window; None: any rows go together
    float_dtype: str = "float32"  # of floats that augment returns for an integer feature
    seed: int = 0
    draws: Draws | None = None  # None: an epoch has each row once


@dataclass(frozen=True)
class Batch:
    """A mini-batch; the first dimension of each array is the rows."""

    inputs: list[np.ndarray]  # each feature is followed by the lengths and mask it asks for
    targets: list[np.ndarray]
    weights: np.ndarray | None = None
    lengths: Sequence[RowLengths | None] = ()  # for each input, then target


def visit_order(
    batch_spec: BatchSpec, partition: MappedPartition, epoch: int, replica: int, share: int
) -> np.ndarray:
    """Return the order (int64) in which ``replica`` visits the rows of its partition in ``epoch``.

    The order is a seeded permutation, or what the replica draws. With bucketing it is cut into windows,
    each with as many whole chunks of ``share`` rows (about the replica's part of a global batch) as
    ``bucketing`` holds.
    The rows of a window are sorted by length, and the chunks are shuffled. The rows that do not
    fill a chunk come last.
    """
    seed, draws, count = batch_spec.seed, batch_spec.draws, len(partition.order)
    share, window = max(1, share), 0
    if batch_spec.bucketing is not None and any(field.ragged for field in partition.fields):
        window = share * max(1, batch_spec.bucketing // share)

    def draw() -> np.ndarray:
        if draws is None:
            order = permutation(seed, epoch, replica, count)
        else:
            order = draws.order(partition, seed, epoch, replica)
        lengths, drawn = partition.lengths() if window else None, len(order)
        if lengths is None:
            return order
        for start in range(0, drawn, window):
            rows = order[start : start + window]
            by_length = np.argsort(lengths[rows % count], kind="stable")
            order[start : start + window] = rows[by_length]
        chunks = drawn // share
        whole = order[: chunks * share].reshape(chunks, share)
        whole[:] = whole[generator(seed, "buckets", epoch, replica).permutation(chunks)]
        return order

    cut = (window, share) if window else ()
    return remembered((seed, epoch, replica, draws, cut, partition.name), draw)


def training_rows(
    batch_spec: BatchSpec, partition: MappedPartition, rows: np.ndarray, epoch: int, replica: int
) -> list[Rows]:
    """Return the fields of ``rows`` of :func:`visit_order`, augmented, before padding.

    The random numbers of a row depend only on (seed, epoch, replica, row), including those that
    ``augment`` draws from global generators, so they are the same in any mini-batch.
    """
    here = rows if batch_spec.draws is None else rows % len(partition.order)
    return _at_place(batch_spec, lambda: partition.gather(here), (rows, epoch, replica))


def preview_batch(batch_spec: BatchSpec, preview: Sequence[Rows], augment: bool = False) -> Batch:
    """Return the rows of a preview as a mini-batch, to try the model (and ``augment``) on."""
    if not augment:
        return fields_to_batch(batch_spec, preview)
    everything = np.arange(len(preview[0]))
    rows = _at_place(batch_spec, lambda: [rows[everything] for rows in preview], (everything, 0, 0))
    return fields_to_batch(batch_spec, rows)


def input_fields(batch_spec: BatchSpec, fields: Sequence[Field]) -> list[Field]:
    """Return the field of each of :attr:`Batch.inputs`; ``fields`` are the fields of a sample."""
    found: list[Field] = []
    for field in fields[: batch_spec.num_features]:
        found.append(field)
        extras = [] if field.padding is None else field.padding.extras
        found += [Field(f"{kind} of {field.name}", "int64", ()) for kind in extras]
    return found


def fields_to_batch(batch_spec: BatchSpec, fields: Sequence[Rows]) -> Batch:
    """Return the rows of each field as a mini-batch."""
    labels = batch_spec.num_features + batch_spec.num_labels
    weights = fields[-1] if batch_spec.weighted else None
    assert not isinstance(weights, Ragged)
    features, targets = fields[: batch_spec.num_features], fields[batch_spec.num_features : labels]
    lengths = [*padded_lengths(features), *padded_lengths(targets, labels=True)]
    return Batch(model_inputs(features), dense(targets), weights, lengths)


def _at_place(
    batch_spec: BatchSpec, gather: Callable[[], Sequence[Rows]], place: tuple[np.ndarray, int, int]
) -> list[Rows]:
    """Gather the fields and augment them, if at all, at ``place``: (rows, epoch, replica).

    ``augment`` may write into the gathered arrays.
    """
    augment = batch_spec.augment
    if augment is None:
        return list(gather())

    def work(seed: Callable[[int], object]) -> list[Rows]:
        fields = gather()
        features = fields[: batch_spec.num_features]
        augmented = _Augmentation(batch_spec, augment, features, *place, seed).rows_changed()
        return [*augmented, *fields[batch_spec.num_features :]]

    whose = getattr(augment, "function", augment)
    name = getattr(whose, "__qualname__", type(whose).__qualname__)
    return steadily(name, work)


@dataclass(frozen=True)
class _Augmentation:
    """The features of some rows, and what changes them, at their place."""

    spec: BatchSpec
    augment: Callable[..., Any]
    features: Sequence[Rows]
    rows: np.ndarray
    epoch: int
    replica: int
    seed: Callable[[int], object]

    def rows_changed(self) -> list[Rows]:
        """Return the features, changed row by row, or all rows by one call."""
        if any(isinstance(f, Ragged) and isinstance(f.values, Ragged) for f in self.features):
            raise ParameterError(
                "augment takes arrays, and a feature is a list of lists of varying length, "
                "sparkdl.Sequence(Sequence()): change such rows in Spark or in the model, or leave it "
                "out."
            )
        at_once = isinstance(getattr(self.augment, "func", self.augment), Batched)  # or a partial
        changed: Sequence[Any] = self._at_once() if at_once else self._row_by_row()
        return [
            Ragged.of(values, feature.padding) if isinstance(feature, Ragged) else values
            for values, feature in zip(changed, self.features, strict=True)
        ]

    def _number(self, purpose: str, *row: int) -> int:
        """Return the seed for a purpose at this place."""
        return derive_seed(self.spec.seed, purpose, self.epoch, self.replica, *row)

    def _row_by_row(self) -> list[Any]:
        results: list[list[np.ndarray]] = [[] for _ in self.features]
        for row, sample in zip(self.rows.tolist(), zip(*self.features, strict=True), strict=True):
            rng = generator(self.spec.seed, "augment", self.epoch, self.replica, row)
            self.seed(self._number("draws of augment", row))
            values = self._called(sample, rng, "one sample")
            for known, value, feature in zip(results, values, self.features, strict=True):
                known.append(value)
                first, varying = known[0], isinstance(feature, Ragged)
                if value.shape[varying:] != first.shape[varying:] or value.ndim < varying:
                    raise ParameterError(
                        f"augment returned an array of shape {list(value.shape)} after one of "
                        f"{list(first.shape)}: they must have the same "
                        f"shape{' but for the length' if varying else ''}."
                    )
        return [
            values if isinstance(feature, Ragged) else np.stack(values)
            for values, feature in zip(results, self.features, strict=True)
        ]

    def _at_once(self) -> list[np.ndarray]:
        arrays = []
        for feature in self.features:
            if isinstance(feature, Ragged) and len(set(feature.lengths.tolist())) > 1:
                raise ParameterError(
                    "sparkdl.Batched takes rows of equal length, and a batch has some of "
                    f"{feature.lengths.min()} to {feature.lengths.max()}: let augment be a function of "
                    "one sample, without Batched."
                )
            arrays.append(np.stack(list(feature)) if isinstance(feature, Ragged) else feature)
        self.seed(self._number("draws of augment", *self.rows[:1].tolist() or [0]))
        changed = self._called(arrays, RowDraws(self._number("augment"), self.rows), "a batch")
        for array, feature in zip(changed, self.features, strict=True):
            if array.ndim <= isinstance(feature, Ragged) or len(array) != len(self.rows):
                raise ParameterError(
                    f"augment returned an array of shape {list(array.shape)} for a batch of "
                    f"{len(self.rows)} rows: a function in sparkdl.Batched returns arrays that begin "
                    "with the rows."
                )
        return changed

    def _called(
        self, arrays: Sequence[Any], rng: np.random.Generator | RowDraws, noun: str
    ) -> list[np.ndarray]:
        """Return what ``augment`` makes of the features of a sample or a batch, in their order."""
        inputs = self.spec.inputs
        try:
            if inputs:
                found = self.augment(**dict(zip(inputs, arrays, strict=True)), rng=rng)
            else:
                found = self.augment(*arrays, rng)
        except Exception as error:
            shapes = ", ".join(f"{value.dtype}{list(value.shape)}" for value in arrays)
            kind = "RowDraws" if isinstance(rng, RowDraws) else "numpy.random.Generator"
            raise ParameterError(
                f"augment raised {type(error).__name__}: {error}. It is called with the arrays of "
                f"{noun} ({shapes}) and a {kind}."
            ) from error
        if isinstance(found, Mapping):
            if set(found) != set(inputs):
                raise ParameterError(
                    f"augment returned a mapping of {', '.join(map(str, found)) or 'nothing'}: return "
                    f"exactly the features, {', '.join(inputs) or 'as a tuple'}."
                )
            found = tuple(found[name] for name in inputs)
        found = found if isinstance(found, tuple) else (found,)
        if len(found) != len(arrays):
            raise ParameterError(
                f"augment returned {len(found)} values for {len(arrays)} features: return a "
                "tuple with as many values as it gets."
            )
        dtypes = [feature.dtype for feature in self.features]
        return [_value(*pair, self.spec.float_dtype) for pair in zip(found, dtypes, strict=True)]


def _value(value: Any, dtype: np.dtype, float_dtype: str) -> np.ndarray:
    """Return a result of ``augment`` for a feature of ``dtype`` as an array.

    Integers may become floats.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if masked(value):
        raise ParameterError("augment returned a masked value: fill it, with value.filled(0), say.")
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise ParameterError(
            f"augment returned {kind_of(value)}, which is not an array of numbers."
        )
    if dtype.kind == "f":
        return array.astype(dtype, copy=False)
    return array.astype(float_dtype, copy=False) if array.dtype.kind == "f" else array
