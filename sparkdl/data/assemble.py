from __future__ import annotations
from dataclasses import dataclass, field
from typing import Any
import numpy as np
from sparkdl.data.batches import permutation

@dataclass(frozen=True, kw_only=True)
class Assembly:
    num_features: int
    num_labels: int
    weighted: bool = False
    augment: Any = None
    bucketing: int | None = None
    sequences: Any = ()
    seed: int = 0

@dataclass
class Batch:
    inputs: list
    targets: list
    weights: Any

def visit_order(assembly, partition, epoch, replica, share):
    return permutation(assembly.seed, epoch, replica, len(partition.order))

def plain_batch(assembly, partition, rows):
    a = partition.gather(rows)
    f, l = assembly.num_features, assembly.num_labels
    return Batch(a[:f], a[f:f+l], a[-1] if assembly.weighted else None)

def training_batch(assembly, partition, rows, epoch, replica):
    return plain_batch(assembly, partition, rows)
