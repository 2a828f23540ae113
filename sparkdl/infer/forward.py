"""A module on its way to the workers, and its forward pass there: arrays in, arrays out."""

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from pyspark import RDD, SparkContext
from torch import nn

from sparkdl.data.ragged import Rows, dense, model_inputs
from sparkdl.errors import ModelError, ParameterError, UserError, cannot_travel
from sparkdl.infer.outputs import OutputColumn, value_of
from sparkdl.metrics.scorer import in_rows
from sparkdl.model.loss import is_own_loss
from sparkdl.model.preparation import Rebuilt, dumps
from sparkdl.model.recipe import BY_POSITION, Signature
from sparkdl.process.determinism import Numerics
from sparkdl.replica.compute import evaluating, to_tensors
from sparkdl.slab.pool import kept_while_used
from sparkdl.spark.broadcasts import INLINE_BYTES, Artifact, BroadcastBytes
from sparkdl.spark.device import task_device
from sparkdl.usercode import accompanied

MAX_LOADED = 2
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NARROW = 128
"""The most channels of a convolution that is faster on the CPU in the layout "channels last"."""
QUANTIZED = (None, "int8")


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


def check_options(precision: Any, quantize: Any) -> None:
    """Raise :class:`ParameterError` for options that are unknown or do not go together."""
    if precision not in PRECISIONS:
        raise ParameterError(f"precision={precision!r}: use one of {', '.join(PRECISIONS)}.")
    if quantize not in QUANTIZED:
        raise ParameterError(f'quantize={quantize!r}: use "int8", or None.')
    if quantize and precision != "fp32":
        raise ParameterError(
            f'quantize="int8" and precision={precision!r} exclude each other: leave one of them out.'
        )
