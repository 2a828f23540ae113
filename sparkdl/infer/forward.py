"""The forward pass of a module: tried on the driver with a few rows, and computed by the workers."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import os
import pickle
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from pyspark import RDD, SparkContext
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.arrow_tasks import of_structs, select_columns, ship_batches
from sparkdl.data.columns.base import Column
from sparkdl.data.columns.numeric import to_numpy
from sparkdl.data.fields import Field
from sparkdl.data.ragged import Ragged, Rows, dense, model_inputs
from sparkdl.data.row_errors import RowError
from sparkdl.errors import DataError, ModelError, UserError, cannot_travel
from sparkdl.infer.outputs import Finish, NoResults, Output, OutputColumn, offered_parts, value_of
from sparkdl.infer.read import ReadColumns, Reader
from sparkdl.metrics.scorer import in_rows
from sparkdl.model.loss import is_own_loss
from sparkdl.model.preparation import Rebuilt, dumps
from sparkdl.model.recipe import BY_POSITION, Part, Signature
from sparkdl.process.determinism import Numerics, seeded
from sparkdl.replica.compute import buffers_kept, evaluating, to_tensors
from sparkdl.slab.pool import kept_while_used
from sparkdl.spark.broadcasts import INLINE_BYTES, Artifact, BroadcastBytes
from sparkdl.spark.device import task_device
from sparkdl.spark.failures import reading_explained
from sparkdl.usercode import accompanied

B = TypeVar("B")
R = TypeVar("R")

ROWS = 2
LOOKED_AT = 32
"""The number of rows among which good ones are looked for, if bad rows are allowed."""
MAX_LOADED = 2
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NARROW = 128
"""The most channels of a convolution that is faster on the CPU in the layout "channels last"."""


def sender_to(data: Any) -> Any:
    """Return the object that can send a module to the executors of a DataFrame or an RDD.

    That is its SparkContext, or its session of Spark Connect, which has no context.
    """
    if isinstance(data, RDD):
        return data.ctx
    return getattr(data.sparkSession, "_sc", data.sparkSession)


@dataclass(frozen=True)
class ShippedModule:
    """A pickled module on its way to the workers, with torch's settings of the driver."""

    digest: str
    inline: bytes | None  # if it is small enough to travel in the task
    apart: BroadcastBytes | Artifact | None = None  # has it otherwise
    sender: Any = None  # stays on the driver
    numerics: Numerics = field(default_factory=Numerics.here)
    on_cpu: bool = False  # even if there is a GPU

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "sender": None}

    @staticmethod
    def of(
        module: nn.Module,
        sender: Any,
        model: Any = None,
        seed: int = 0,
        origin: tuple[nn.Module, Any] | None = None,
        keep: bool = True,
    ) -> ShippedModule:
        """Send a module; return its handle, which is that of the last time if nothing has changed.

        ``model``, called with ``seed``, has built the module. It is sent with the module's tensors
        if the module itself cannot be pickled. ``origin`` is the user's module, and the form of it
        that is sent, if it is a copy. Without ``keep``, the caller destroys what is new.
        """
        data = _pickled(module, model, seed)
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        owner, form = origin or (module, None)
        known = ShippedModule.before(owner, form)
        same = digest, sender, Numerics.here()
        if known is not None and (known.digest, known.sender, known.numerics) == same:
            return known
        apart: BroadcastBytes | Artifact | None = None
        if len(data) > INLINE_BYTES and isinstance(sender, SparkContext):
            apart = BroadcastBytes.of(sender, [data])
        elif len(data) > INLINE_BYTES:
            apart = Artifact.of(data, f"sparkdl-{digest}.module", sender)
        sent = ShippedModule(digest, None if apart else data, apart, sender)
        if keep:
            _sent.setdefault(owner, {})[form] = sent
        return sent

    @staticmethod
    def before(module: nn.Module, form: Any = None) -> ShippedModule | None:
        """Return the handle of a module that was sent last."""
        return _sent.get(module, {}).get(form)

    def destroy(self) -> None:
        """Delete the broadcast, here and on the executors; nothing may use it afterwards."""
        if self.apart is not None:
            self.apart.destroy()

    def load(self) -> nn.Module:
        """Return the module in evaluation mode on this task's device.

        It comes from the process's cache if it is there.
        """
        self.numerics.use()
        known = list(_loaded)  # a copy: another thread may remove some
        before = next((device for digest, device in known if digest == self.digest), None)
        device = torch.device("cpu") if self.on_cpu else task_device(before)
        key = self.digest, device
        module = _loaded.get(key)
        if module is None:
            data = self.inline if self.apart is None else self.apart.value
            assert data is not None
            module = _loaded[key] = pickle.loads(data).eval().to(device)
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            while len(_loaded) > MAX_LOADED:
                _loaded.popitem(last=False)
        _loaded[key] = module  # again, in case it was removed meanwhile
        _loaded.move_to_end(key)
        if device.type == "cuda":
            _on_gpus.used()
        return module


def _pickled(module: nn.Module, model: Any, seed: int) -> bytes:
    """Return the pickled module, or its builder and tensors. Raises ModelError."""
    try:
        return dumps(accompanied(module))
    except Exception as error:
        if isinstance(model, nn.Module) or not callable(model):
            remedy = "Load it with model=make_model, a function that builds the module."
            raise ModelError(cannot_travel("the module", error, remedy)) from None
    return dumps(accompanied(Rebuilt.of(module, model, seed)))


_sent: weakref.WeakKeyDictionary[nn.Module, dict[Any, ShippedModule]] = weakref.WeakKeyDictionary()
"""The forms in which each module was sent last: a large one is sent once while it stays the same."""
_loaded: OrderedDict[tuple[str, torch.device], nn.Module] = OrderedDict()
_on_gpus = kept_while_used(_loaded.clear)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's parameters and buffers, or the CPU if it has none."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


@dataclass(frozen=True)
class Forward:
    """The forward pass of a model."""

    module: nn.Module  # in evaluation mode
    signature: Signature
    precision: str = "fp32"  # one of PRECISIONS

    def returned(self, arrays: Sequence[Rows], own: tuple[Any, Sequence[Rows]] = (None, ())) -> Any:
        """Return what the model returns for a batch; raise ModelError if it fails.

        Rows of varying length are padded, and their lengths follow them as an input if their
        :class:`sparkdl.data.ragged.Padding` says so. ``own``: the loss and the labels, for a model
        that computes its loss itself.
        """
        device, (loss, labels) = device_of(self.module), own
        signature = replace(self.signature, sparse=())  # the inputs are vectors already
        inputs = self._inputs(model_inputs(arrays), device)
        targets = to_tensors(dense(labels), device) if is_own_loss(loss) else []
        with evaluating(self.module), self._autocast(device):
            try:
                return signature.call_for_loss(loss, self.module, inputs, targets)
            except (torch.OutOfMemoryError, UserError):
                raise
            except Exception as error:
                shapes = ", ".join(
                    f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs
                )
                raise ModelError(
                    f"the model fails on a batch of {shapes}: {type(error).__name__}: "
                    f"{str(error).strip().rstrip('. ')}."
                ) from error

    def predictions(
        self, arrays: Sequence[Rows], columns: Iterable[OutputColumn]
    ) -> list[np.ndarray]:
        """Return the values of each column for a batch."""
        count, fixed = len(arrays[0]), getattr(self.module, "fixed_rows", None)
        if fixed is not None and count < fixed:
            filled = np.minimum(np.arange(fixed), count - 1)  # the last row again
            arrays = [rows[filled] for rows in arrays]
        returned, found = self.returned(arrays), []
        for column in columns:
            found.append(column.values(returned, len(arrays[0]))[:count])
            if len(found[-1]) != count:
                raise ModelError(
                    f'output "{column.name}" has {len(found[-1])} rows for a batch of {count}.'
                )
        return found

    def _inputs(self, arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        """Return what the model gets of the arrays; floats in the dtype of one in half precision."""
        inputs = self.signature.model_inputs(to_tensors(arrays, device))
        own = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), None)
        if own not in (torch.bfloat16, torch.float16):
            return list(inputs)
        return [t.to(own) if t.is_floating_point() else t for t in inputs]

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return (
            contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
        )


def run_batches(
    module: nn.Module,
    arrays: Sequence[Rows],
    batch_size: int,
    dimensions: int | None = None,
    signature: Signature = BY_POSITION,
    own: tuple[Any, Sequence[Rows]] = (None, ()),
) -> Iterator[tuple[Any, slice]]:
    """Yield the module's output and the range of rows that it is for, batch by batch.

    ``dimensions`` is the number of those of a batch's output, if it is known.
    """
    forward, (loss, labels) = Forward(module, signature), own
    for start in range(0, len(arrays[0]), batch_size):
        rows = slice(start, start + batch_size)
        inputs = [array[rows] for array in arrays]
        returned = forward.returned(inputs, (loss, [label[rows] for label in labels]))
        with torch.no_grad():
            output = in_rows(value_of(returned, signature.part), len(inputs[0]), dimensions)
        yield output, rows  # outside the block: the caller may want gradients


def in_halves(
    batch: B,
    count: int,
    compute: Callable[[B], R],
    some: Callable[[B, np.ndarray], B],
    bad: Callable[[B, str], object] | None,
) -> Iterator[tuple[B, R]]:
    """Yield what ``compute`` returns for a batch of ``count`` rows, with the batch.

    A batch that does not fit into the GPU's memory is halved; ``some`` takes rows out of it. So is one
    that the model fails on, if ``bad`` takes such rows with the reason, until they are alone.
    """
    try:
        yield batch, compute(batch)
        return
    except (torch.OutOfMemoryError, ModelError) as error:
        memory = isinstance(error, torch.OutOfMemoryError)
        if count == 1 and bad is not None:
            bad(batch, str(error))
            return
        if count == 1 or (bad is None and not memory):
            raise
    if memory:
        torch.cuda.empty_cache()
    for rows in np.array_split(np.arange(count), 2):
        yield from in_halves(some(batch, rows), len(rows), compute, some, bad)


def for_convolutions(module: nn.Module) -> nn.Module:
    """Return a copy of a module with narrow convolutions that has the layout in which they are fast.

    That is "channels last", whose results differ in the last bits. Any other module is returned itself.
    """
    layers = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    narrow = all(
        max(one.in_channels, one.out_channels) <= NARROW and one.groups == 1 for one in layers
    )
    if not layers or not narrow:
        return module
    try:
        return copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    except Exception:  # it does not copy
        return module


def quantized(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose linear and recurrent layers compute in int8, on the CPU.

    Weights are quantized here, activations batch by batch (dynamic quantization).
    """
    from torch.ao import quantization

    kinds = {nn.Linear, nn.LSTM, nn.GRU}
    if not any(type(part) in kinds for part in module.modules()):
        raise ModelError(
            f'quantize="int8" is for layers of {", ".join(sorted(k.__name__ for k in kinds))}, and the '
            f"model ({type(module).__name__}) has none."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch recommends another package in its place
            return quantization.quantize_dynamic(module, kinds, dtype=torch.qint8)  # type: ignore[arg-type]
    except Exception as error:
        raise ModelError(
            f'quantize="int8": torch cannot quantize the model: {type(error).__name__}: {error}'
        ) from error


@dataclass(frozen=True)
class Trial:
    """A trial of a model, whose result is the columns of its outputs."""

    forward: Forward
    parts: Mapping[str, Part] | None  # by column; None: those that it offers
    name: str  # of the column if there is one
    finish: Finish = None
    known: Output | None = None  # of the part, from the training

    def run(
        self, made: Sequence[Rows] | None, rows: Callable[[int], Iterator[Sequence[Rows]]]
    ) -> tuple[tuple[OutputColumn, ...], int]:
        """Return :meth:`columns` of the made-up rows or, if the model fails on these, of others.

        ``rows`` are called with a number of rows: a larger one if none of the first has a result that
        shows the type of a column.
        """
        failed: UserError | None = None
        try:
            if self.known is not None:
                zeros = torch.zeros(ROWS, *self.known.shape, dtype=getattr(torch, self.known.dtype))
                ((name, part),) = (self.parts or {self.name: None}).items()
                return (OutputColumn.of(name, part, zeros, ROWS, self.finish),), 0
            if made is not None:
                return self.columns(made)
        except UserError as error:
            if error.__cause__ is None and not isinstance(error, NoResults):  # on any rows
                raise
            failed = error
        for count in (ROWS, LOOKED_AT):
            for some in rows(count):
                try:
                    return self.columns(some)
                except UserError as error:
                    failed = error
            if not isinstance(failed, NoResults):
                break
        raise failed or DataError(
            "the data is a stream, whose rows cannot be looked at beforehand, or it has no good row to "
            "try the model on: pass example=, a DataFrame with some rows."
        )

    def columns(self, arrays: Sequence[Rows]) -> tuple[tuple[OutputColumn, ...], int]:
        """Return the columns that the model's outputs for these rows come to.

        Return also the bytes of the largest tensor that a layer returns for a row, or for an element
        of a row whose length varies.
        """
        fixed = getattr(self.forward.module, "fixed_rows", None)
        if fixed is not None:
            arrays = [array[np.arange(fixed) % len(array)] for array in arrays]
        with largest_tensor(self.forward.module) as bytes_of:
            returned = self._returned(arrays)
        rows = len(arrays[0])
        chosen = offered_parts(returned, rows, self.name) if self.parts is None else self.parts
        values = {name: value_of(returned, part) for name, part in chosen.items()}
        found = [
            OutputColumn.of(name, chosen[name], value, rows, self.finish)
            for name, value in values.items()
        ]
        if self.finish is not None or not any(isinstance(array, Ragged) for array in arrays):
            return tuple(found), bytes_of[0] // rows
        padded, other = (_padded_length(some) for some in (arrays, _of_other_length(arrays)))
        unit_bytes = bytes_of[0] // (rows * padded)
        try:
            again = self._returned(_of_other_length(arrays))
        except ModelError:
            return tuple(found), unit_bytes
        follows = {
            column.name: column.output is not None
            and column.output.shape[:1] == (padded,)
            and tuple(value_of(again, column.part).shape[1:2]) == (other,)
            for column in found
        }
        return tuple(replace(one, by_element=follows[one.name]) for one in found), unit_bytes

    def _returned(self, arrays: Sequence[Rows]) -> Any:
        module = self.forward.module
        with seeded(0), evaluating(module), buffers_kept(module):
            return self.forward.returned(arrays)


@contextlib.contextmanager
def largest_tensor(module: nn.Module) -> Iterator[list[int]]:
    """Yield a list whose one number becomes the bytes of the largest tensor that a layer returns."""
    largest = [0]

    def note(layer: nn.Module, inputs: Any, returned: Any) -> None:
        if isinstance(returned, torch.Tensor):
            largest[0] = max(largest[0], returned.nbytes)

    layers = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def _of_other_length(arrays: Sequence[Rows]) -> list[Rows]:
    """Return rows of varying length as shorter ones, or longer ones if they have one element."""
    changed: list[Rows] = []
    for array in arrays:
        if isinstance(array, Ragged) and (longest := int(array.lengths.max())) > 1:
            changed.append(array.cut(longest - 1))
        elif isinstance(array, Ragged):
            twice = np.repeat(np.arange(len(array.used)), 2)
            offsets = (array.offsets - array.offsets[0]) * 2
            changed.append(Ragged(array.used[twice], offsets, array.padding))
        else:
            changed.append(array)
    return changed


def _padded_length(arrays: Sequence[Rows]) -> int:
    return next(int(array.padded().shape[1]) for array in arrays if isinstance(array, Ragged))


def zeros_like(
    fields: Sequence[Field], rows: int = ROWS, length: int = ROWS, number: int = 0
) -> list[Rows]:
    """Return rows of ``number``, of ``length`` elements; lists in lists have 4 more a level."""
    arrays: list[Rows] = []
    for one in fields:
        lengths = [length + 4 * level for level in range(len(one.rules))]
        counts = np.cumprod([rows, *lengths])
        zeros: Rows = np.full((counts[-1], *one.shape), number, one.dtype)
        for rule, count, size in reversed(list(zip(one.rules, counts[:-1], lengths, strict=True))):
            zeros = Ragged(zeros, np.arange(count + 1) * size, rule)
        arrays.append(zeros)
    return arrays


def made_up(columns: Sequence[Column], types: Sequence[Any]) -> list[Rows] | None:
    """Return two rows that look like those of the columns, or None if that cannot be known."""
    arrays = []
    for column, kind in zip(columns, types, strict=True):
        if kind.typeName() == "string":
            (array,) = of_structs([pa.array(["a", "a a"])] * len(column.names), [column])
        elif column.depth == 0 and column.spec is None:
            array = pa.array(np.zeros(ROWS, column.dtype))
        else:
            return None
        try:
            arrays.append(to_numpy(array, column))
        except RowError:
            return None
    return arrays


def rows_to_try(
    data: DataFrame | RDD, reader: Reader, keep: bool, count: int = ROWS
) -> Iterator[list[Rows]]:
    """Yield the first ``count`` rows, by one Spark job; single ones of more if bad ones are allowed.

    A stream has none that could be looked at.
    """
    items: Any
    count, noun = LOOKED_AT if keep else count, "column"
    if isinstance(data, DataFrame):
        assert isinstance(reader, ReadColumns)
        if data.isStreaming:
            return
        with reading_explained("looking at the first rows"):
            chosen = select_columns(data, reader.columns).limit(count)
            shipped = chosen.mapInArrow(ship_batches, "source int, batches binary").collect()
        tables = [pa.ipc.open_stream(bytes(row[1])).read_all() for row in shipped]
        tables = [table for table in tables if table.num_rows] or [pa.table({})]
        arrays = [column.combine_chunks() for column in pa.concat_tables(tables).columns]
        number = len(arrays[0]) if arrays else 0
        items = arrays if number else []
        singles = [[array.take(pa.array([i, i])) for array in arrays] for i in range(number)]
    else:
        noun = "field"
        with reading_explained("looking at the first records"):
            items = data.take(count)
        singles = [[record, record] for record in items]
    if not keep and items:
        try:
            yield reader.read(items)
        except RowError as error:
            raise DataError(error.problem.message("the data", noun)) from None
    for single in singles if keep else ():
        try:
            yield reader.read(single)
        except RowError:
            continue
