"""A run as its tasks see it: the constants of a fit, and the way to the live replica."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pickle
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparkdl.errors import StaleReferenceError
from sparkdl.model.live_replica import LiveReplica
from sparkdl.model.recipe import Recipe
from sparkdl.process.memory import keep_heap
from sparkdl.process.numerics import Numerics
from sparkdl.replica.cache import forget, live_replica
from sparkdl.slab.gpu_memory import hold
from sparkdl.slab.root import SlabConfig, open_private, open_root, write_private

if TYPE_CHECKING:
    from sparkdl.data.batches import BatchSpec


@dataclass(frozen=True)
class RunSpec:
    """The constants of a fit: slabs, seed, M replicas, N slices, how rows become mini-batches, and
    torch's threads in a task (they change the bits, so they are fixed).

    ``shares``: for each replica, about how many rows of its partition a mini-batch takes.
    ``whole_tensors``: slices are cut between tensors only, because the optimizer or the compression
    wants it so. ``compressed``: gradients travel compressed. ``numerics``: torch's settings of the
    driver.
    """

    slab: SlabConfig
    seed: int
    replicas: int
    slices: int
    assembly: BatchSpec
    shares: tuple[int, ...]
    threads: int
    whole_tensors: bool = False
    compressed: bool = False
    numerics: Numerics = field(default_factory=Numerics)

    @property
    def key(self) -> str:
        return self.slab.name


RECIPE = "recipe"


@dataclass(frozen=True)
class ReplicaHandle:
    """What the replica RDD holds for replica ``index``: its run and the checksum of its samples."""

    run: RunSpec
    index: int
    checksum: int


def install_recipe(run: RunSpec, pieces: Iterable[bytes], nbytes: int = 0) -> None:
    """Put the pickled recipe, ``nbytes`` in ``pieces``, into this node's slab root, unless it is there,
    where there is room."""
    root = open_root(run.slab, create=True)
    assert root is not None
    if any((directory / RECIPE).exists() for directory in root.directories):
        return
    places = [directory / RECIPE for directory in root.directories_for(nbytes)]
    for path in places:
        draft = Path(f"{path}.{secrets.token_hex(8)}")
        try:
            write_private(draft, pieces)
            os.replace(draft, path)
            return
        except OSError as error:
            draft.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC or path == places[-1]:
                raise


def open_replica(run: RunSpec) -> LiveReplica:
    """The live replica of this process, built from the node's recipe where it is not cached."""
    run.numerics.use()
    if torch.get_num_threads() != run.threads:
        torch.set_num_threads(run.threads)
    return live_replica(run.key, lambda: _load_recipe(run), lambda: _hold(run))


_holding: dict[str, threading.Thread] = {}
"""What lets go of a run's replica on a GPU, by the run."""


def _hold(run: RunSpec) -> None:
    """Until the run ends on this node, however often its replica is built."""
    root = open_root(run.slab)
    for key in [key for key, thread in _holding.items() if not thread.is_alive()]:
        del _holding[key]
    if root is not None and run.key not in _holding:
        _holding[run.key] = hold(root.directories[-1], functools.partial(forget, run.key))


def build_replica(run: RunSpec) -> LiveReplica:
    """The live replica of this process, built anew, whatever it was before: its weights are the
    recipe's. In one that was there before they need not be, nor anything else that training changes,
    even where nothing was read into it: it may have computed with weights that lay elsewhere.
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
    # the root was deleted, and is there anew
    raise StaleReferenceError(f"the recipe in {root.directories[0]} was deleted")
