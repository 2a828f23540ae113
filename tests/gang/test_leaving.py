"""What DistributedDataParallel leaves behind, when a rank ends. One rank, no Spark."""

from __future__ import annotations

import weakref

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparkdl.gang.group import leave

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
