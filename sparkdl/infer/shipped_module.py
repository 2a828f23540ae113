"""The module in a worker: sent once, loaded once per process, and run in batches."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pyspark import RDD, SparkContext
from torch import nn

from sparkdl.data.ragged import Rows, dense, model_inputs
from sparkdl.errors import ModelError, UserError, cannot_travel
from sparkdl.metrics.scorer import in_rows
from sparkdl.model.loss import is_own_loss
from sparkdl.model.preparation import Rebuilt, dumps
from sparkdl.model.recipe import BY_POSITION, Signature, with_tensors
from sparkdl.process.determinism import Numerics
from sparkdl.replica.compute import evaluating, to_tensors
from sparkdl.slab.pool import kept_while_used
from sparkdl.spark.broadcasts import INLINE_BYTES, Artifact, BroadcastBytes
from sparkdl.spark.device import task_device
from sparkdl.usercode import accompanied, tell_of_changed_constants

Dimensions = tuple[int | None, int | None]
"""The numbers of dimensions of a batch's output and of the predictions made from it."""
MAX_LOADED = 2


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
        before: ShippedModule | None = None,
        model: Any = None,
        seed: int = 0,
    ) -> ShippedModule:
        """Send a module; return its handle, which is ``before`` if nothing has changed since.

        ``model``, called with ``seed``, has built the module. It is sent with the module's tensors
        if the module itself cannot be pickled.
        """
        tell_of_changed_constants(module)
        data = _pickled(module, model, seed)
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        known = before is not None and before.digest == digest and before.sender is sender
        if before is not None and known and before.numerics == Numerics.here():
            return before
        if len(data) <= INLINE_BYTES:
            return ShippedModule(digest, data, None, sender)
        if isinstance(sender, SparkContext):
            return ShippedModule(digest, None, BroadcastBytes.of(sender, [data]), sender)
        artifact = Artifact.of(data, f"sparkdl-{digest}.module", sender)
        return ShippedModule(digest, None, artifact, sender)

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


_loaded: OrderedDict[tuple[str, torch.device], nn.Module] = OrderedDict()
_on_gpus = kept_while_used(_loaded.clear)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's parameters and buffers, or the CPU if it has none."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def run_batches(
    module: nn.Module,
    arrays: Sequence[Rows],
    batch_size: int,
    finish: Callable[[Any], Any] | None = None,
    dimensions: Dimensions = (None, None),
    signature: Signature = BY_POSITION,
    own: tuple[Any, Sequence[Rows]] = (None, ()),
) -> Iterator[tuple[Any, slice]]:
    """Yield the module's output and the range of rows that it is for, batch by batch.

    Rows of varying length are padded batch by batch. Their lengths follow them as an input if their
    :class:`sparkdl.data.ragged.Padding` says so.

    ``finish`` gets the model's output on the CPU, and its result is yielded instead. ``own``: the
    loss and the labels, for a model that computes its loss itself.
    """
    device = device_of(module)
    for start in range(0, len(arrays[0]), batch_size):
        rows = slice(start, start + batch_size)
        inputs = to_tensors(model_inputs([array[rows] for array in arrays]), device)
        count, (loss, labels) = len(inputs[0]), own
        targets = []
        if is_own_loss(loss):
            targets = to_tensors(dense([label[rows] for label in labels]), device)
        with evaluating(module):
            try:
                returned = signature.call_for_loss(loss, module, inputs, targets)
                output = in_rows(signature.output(returned), count, dimensions[0])
            except (torch.OutOfMemoryError, UserError):
                raise
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                shapes = ", ".join(
                    f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs
                )
                raise ModelError(
                    f"the model fails on a batch of {shapes}: {type(error).__name__}: "
                    f"{str(error).rstrip('. ')}. Give columns of the shapes and types that it was "
                    "trained on."
                ) from error
            result = in_rows(finish(_on_cpu(output)), count, dimensions[1]) if finish else output
        yield result, rows  # outside the block: the caller may want gradients


def _on_cpu(output: Any) -> Any:
    """Return ``output`` with all tensors on the CPU, where the user's function was tried."""
    return with_tensors(output, torch.Tensor.cpu)
