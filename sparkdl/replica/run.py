"""A run as its tasks see it: the constants of a fit, and the live replica of this process.

The live replica is kept between tasks, but only as a cache: Spark assigns tasks to pooled workers
in any order and ends idle ones, so an entry may be missing at any time, and building it again gives
the same replica.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparkdl.errors import StaleReferenceError
from sparkdl.model.flat import Layout
from sparkdl.model.recipe import LiveReplica, Recipe
from sparkdl.process.determinism import Numerics
from sparkdl.process.memory import keep_heap
from sparkdl.slab.pool import make_room, released, watch
from sparkdl.slab.root import SlabConfig, open_private, open_root, write_private
from sparkdl.slices.optimizer import OptimizerSpec
from sparkdl.slices.spec import SliceSpec, slice_specs
from sparkdl.slices.update import SliceUpdater
from sparkdl.spark.device import task_device

if TYPE_CHECKING:
    from sparkdl.data.batches import BatchSpec


@dataclass(frozen=True)
class RunSpec:
    """The constants of a fit."""

    slab: SlabConfig
    seed: int
    replicas: int
    slices: int
    batch_spec: BatchSpec
    shares: tuple[int, ...]  # by replica: about how many rows a mini-batch takes
    threads: int  # torch's in a task; fixed, because they change the bits
    whole_tensors: bool = False  # slices are cut only between tensors
    keeps_tensors: bool = False  # replicas keep some between iterations
    numerics: Numerics = field(default_factory=Numerics)

    @property
    def key(self) -> str:
        return self.slab.name


RECIPE = "recipe"


@dataclass(frozen=True)
class ReplicaHandle:
    """The element of the replica RDD for replica ``index``: its run and the checksum of its
    samples."""

    run: RunSpec
    index: int
    checksum: int


def install_recipe(run: RunSpec, fragments: Iterable[bytes], nbytes: int = 0) -> None:
    """Write the pickled recipe into this node's slab root, unless it is there already.

    The first directory with enough space is used.
    """
    root = open_root(run.slab, create=True)
    assert root is not None
    if any((directory / RECIPE).exists() for directory in root.directories):
        return
    places = [directory / RECIPE for directory in root.directories_for(nbytes)]
    for path in places:
        draft = Path(f"{path}.{secrets.token_hex(8)}")
        try:
            write_private(draft, fragments)
            os.replace(draft, path)
            return
        except OSError as error:
            draft.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC or path == places[-1]:
                raise


def open_replica(run: RunSpec) -> LiveReplica:
    """Return the live replica of this process; build it from the node's recipe if it is not cached."""
    run.numerics.use()
    if torch.get_num_threads() != run.threads:
        torch.set_num_threads(run.threads)
    return live_replica(run.slab, lambda: _load_recipe(run))


def build_replica(run: RunSpec) -> LiveReplica:
    """Build the live replica of this process anew, so that its weights are the recipe's.

    A replica that is there already may have other weights, and other values of anything that
    training changes, even if no weights were read into it: it may have computed with weights that
    lay elsewhere.
    """
    forget(run.key)
    return open_replica(run)


def _load_recipe(run: RunSpec) -> Recipe:
    keep_heap()
    root = open_root(run.slab)
    if root is None:
        raise StaleReferenceError(f"this node has no slab root {run.slab.name}")
    for directory in root.directories:
        with contextlib.suppress(FileNotFoundError):
            with open(directory / RECIPE, "rb", opener=open_private) as file:
                recipe = pickle.load(file)
            assert isinstance(recipe, Recipe)
            return recipe
    # the root was deleted and made again
    raise StaleReferenceError(f"the recipe in {root.directories[0]} was deleted")


@dataclass(frozen=True)
class OpenRun:
    """The updaters of a run's slices, and the updater of a single slice that is the whole flat
    vector."""

    owners: list[SliceUpdater]
    whole: SliceUpdater
    layout: Layout

    @staticmethod
    def of(replica: LiveReplica, run: RunSpec) -> OpenRun:
        """Derive the plans from a built recipe. The driver has tried, for all, how the optimizers
        may be cut."""
        recipe, layout = replica.recipe, replica.flat.layout
        parameters = [parameter for _, parameter in replica.flat.parameters]
        module, options, cut = replica.flat.module, recipe.options, not run.whole_tensors
        optimizer = OptimizerSpec.of(recipe.for_slices, parameters, module)
        own = optimizer if not options.outer else OptimizerSpec.of(recipe, parameters, module)
        plans = slice_specs(layout, run.slices, whole=run.whole_tensors)
        (whole,) = slice_specs(layout, 1)
        return OpenRun(
            [SliceUpdater.of(plan, optimizer, options, layout, cut) for plan in plans],
            SliceUpdater.of(whole, own, options, layout, cut and not options.outer),
            layout,
        )

    @property
    def slices(self) -> list[SliceSpec]:
        return [owner.plan for owner in self.owners]

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype


_plans: OrderedDict[str, OpenRun] = OrderedDict()


_KEEP = 2


def plans_of(run: RunSpec) -> OpenRun:
    """Return the plans of ``run``, which are kept between tasks."""
    run.numerics.use()
    plans = _plans.get(run.key)
    if plans is None:
        plans = _plans[run.key] = OpenRun.of(open_replica(run), run)
        while len(_plans) > _KEEP:
            _plans.popitem(last=False)
    return plans


@released
def _forget_plans(run: str) -> None:
    _plans.pop(run, None)


MAX_LIVE_REPLICAS = 2


_live: OrderedDict[tuple[str, torch.device], LiveReplica] = OrderedDict()


def live_replica(slab: SlabConfig, load: Callable[[], Recipe]) -> LiveReplica:
    """Return the replica of a run on this task's device, released when the run ends here."""
    device = task_device()
    key = slab.name, device
    replica = _live.get(key)
    if replica is None:
        on_gpu = device.type == "cuda"
        if on_gpu:
            make_room()
        watch(slab, awaited=on_gpu)
        replica = LiveReplica.of(load(), device)
    _live[key] = replica  # again, in case it was released meanwhile
    _live.move_to_end(key)
    while len(_live) > MAX_LIVE_REPLICAS:
        _live.popitem(last=False)
    return replica


@released
def forget(run: str) -> None:
    """Remove the replica of ``run`` from this process."""
    for key in [key for key in list(_live) if key[0] == run]:
        _live.pop(key, None)  # a thread may have removed it


FOR_A_FULL_GPU = (
    "Give the GPU less to hold: a smaller batch_size, mini-batches in parts (accumulate=2), "
    'precision="bf16", activation_checkpointing=, or strategy="fsdp" on a gang of several GPUs.'
)


@contextlib.contextmanager
def full_gpu_explained() -> Iterator[None]:
    """Add to the error of a GPU whose memory is full what to change in the training."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        told = torch.OutOfMemoryError(f"{str(error).rstrip('. ')}. {FOR_A_FULL_GPU}")
        raise told.with_traceback(error.__traceback__) from None
