"""The samples of a search on the nodes of its tasks: the driver's files, or copies of them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyspark import SparkContext

from sparkdl.data.fields import SampleHandle
from sparkdl.data.partition_reader import segment_files
from sparkdl.data.partition_writer import where_there_is_room
from sparkdl.data.samples import SampleSet
from sparkdl.errors import ParameterError
from sparkdl.slab.root import SlabConfig, open_root, read_private, write_private
from sparkdl.spark.broadcasts import BroadcastBytes
from sparkdl.spark.frames import is_local

MOST_BYTES = 4 << 30
"""The most bytes of samples that are copied to every node."""


@dataclass(frozen=True)
class SampleFiles:
    """Sample files that the driver wrote, for tasks on any node.

    In local mode tasks map the driver's files. On a cluster the files are broadcast, and the first
    task on a node writes them into the slab root there, which other tasks on the node map too.
    """

    slab: SlabConfig
    names: tuple[str, ...]  # without their folders
    copies: BroadcastBytes | None  # None in local mode

    @staticmethod
    def of(context: SparkContext, slab: SlabConfig, samples: Sequence[SampleSet]) -> SampleFiles:
        """Broadcast the files of ``samples``, unless tasks can map them where they are."""
        if is_local(context):
            return SampleFiles(slab, (), None)
        found = (path for one in samples for handle in one.handles for path in _paths(handle))
        paths = list(dict.fromkeys(found))  # partitions may share files
        total = sum(os.path.getsize(path) for path in paths)
        if total > MOST_BYTES:
            raise ParameterError(
                f"the samples have {total / 1e9:,.1f} GB, and trials side by side need all of them on "
                f"every node: at most {MOST_BYTES / 1e9:,.1f} GB are copied. Search on a part of the "
                "rows, or with parallel=1, where each trial is distributed."
            )
        copies = BroadcastBytes.of(context, [read_private(path) for path in paths])
        return SampleFiles(slab, tuple(os.path.basename(path) for path in paths), copies)

    def here(self, samples: SampleSet) -> SampleSet:
        """Return ``samples`` as this task can map them."""
        if self.copies is None:
            return samples
        folder = self._installed()
        handles = tuple(
            replace(
                handle,
                segments=tuple(
                    replace(segment, path=_in(folder, segment.path)) for segment in handle.segments
                ),
                order_path=_in(folder, handle.order_path) if handle.order_path else "",
            )
            for handle in samples.handles
        )
        return replace(samples, handles=handles)

    def _installed(self) -> Path:
        """Return the folder of this node that has all files, after writing those that are missing."""
        assert self.copies is not None
        root = open_root(self.slab, create=True)
        assert root is not None
        for folder in root.directories:
            if all((folder / name).exists() for name in self.names):
                return folder
        return where_there_is_room(root, self._write, 0, sum(self.copies.lengths))

    def _write(self, folder: Path) -> Path:
        """Write the files into ``folder``; another task may do so at the same time."""
        assert self.copies is not None
        for name, data in zip(self.names, self.copies.parts(), strict=True):
            draft = folder / f"{name}.{secrets.token_hex(8)}"
            try:
                write_private(draft, data)
                os.replace(draft, folder / name)
            finally:
                draft.unlink(missing_ok=True)
        return folder


def _paths(handle: SampleHandle) -> list[str]:
    """Return the paths of all files of a partition."""
    rows = [name for segment in handle.segments for name in segment_files(segment, handle.fields)]
    return [*rows, handle.order_path] if handle.order_path else rows


def _in(folder: Path, path: str) -> str:
    """Return the path of the same file name in ``folder``."""
    return str(folder / os.path.basename(path))
