"""What DistributedDataParallel leaves behind, when a rank ends. One rank, no Spark."""

from __future__ import annotations

import weakref

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.gang.process_group import leave

pytestmark = pytest.mark.gang


def test_a_reducer_goes_before_the_process_group(tmp_path):
    """Also while something, a traceback say, holds the module."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    module = DistributedDataParallel(nn.Linear(3, 2))
    reducer = weakref.ref(module.reducer)
    assert reducer() is not None
    leave()
    assert reducer() is None
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("backend", "failed", "aborted"),
    [("gloo", True, 0), ("cpu:gloo,cuda:nccl", True, 1), ("cpu:gloo,cuda:nccl", False, 0)],
)
def test_nccl_is_not_waited_for_after_an_error(tmp_path, monkeypatch, backend, failed, aborted):
    """It waits for ranks that are lost. None is here: the group says that it is of NCCL."""
    calls = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append(1))
    leave(failed=failed)
    assert len(calls) == aborted
    assert not dist.is_initialized()
    leave(failed=failed)  # the user's function may have done it
