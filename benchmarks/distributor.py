"""TorchDistributor as its users run it: Parquet, then DDP with a DataLoader on each rank.

``pyspark.ml.torch.distributor`` hands no data over. So the DataFrame is written as Parquet; each rank
reads it with pyarrow and takes its part of every epoch by a DistributedSampler; rank 0 saves the
weights; and ``predict_batch_udf`` predicts on the DataFrame.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from pyspark.ml.functions import predict_batch_udf
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, FloatType
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from work import NAMES, Work


class ParquetRows(Dataset):
    """Rows of a Parquet folder as tensors in memory. A batch is gathered at once, which is faster
    than row by row."""

    def __init__(self, path: str) -> None:
        table = pq.read_table(path, columns=list(NAMES))
        features, self.y = (table.column(name).combine_chunks() for name in NAMES)
        width = len(features[0])
        self.x = torch.from_numpy(features.flatten().to_numpy().reshape(-1, width).copy())
        self.y = torch.from_numpy(self.y.to_numpy().copy())

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[row], self.y[row]

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[rows], self.y[rows]


def _as_it_is(batch: Any) -> Any:
    return batch


def train_rank(work: Work, path: str, batch: int, epochs: int, out: str) -> dict[str, float] | None:
    """Body of a rank; of rank 0, when its parts ended (seconds since 1970)."""
    entered = time.time()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = ParquetRows(path)
    read = time.time()
    torch.manual_seed(0)
    module = nn.parallel.DistributedDataParallel(work.make())
    optimizers = work.optimizers(module.module)
    sampler = DistributedSampler(rows, world, rank)
    loader = DataLoader(rows, batch // world, sampler=sampler, collate_fn=_as_it_is)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            work.loss(module(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    trained = time.time()
    if rank == 0:
        torch.save(module.module.state_dict(), out)
    dist.destroy_process_group()
    return {"entered": entered, "read": read, "trained": trained} if rank == 0 else None


def timed_steps(work: Work, path: str, batch: int, steps: int) -> tuple[list[float], Any]:
    """Body of a rank: the seconds of each step, and the weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = ParquetRows(path)
    torch.manual_seed(0)
    module = nn.parallel.DistributedDataParallel(work.make())
    (optimizer,) = work.optimizers(module.module)
    seconds: list[float] = []
    sampler = DistributedSampler(rows, world, rank)
    while len(seconds) < steps:
        sampler.set_epoch(len(seconds))
        ended = time.perf_counter()
        for x, y in DataLoader(rows, batch // world, sampler=sampler, collate_fn=_as_it_is):
            optimizer.zero_grad(set_to_none=True)
            work.loss(module(x), y).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - ended)
            ended = time.perf_counter()
    weights = module.module.state_dict()
    dist.destroy_process_group()
    return seconds[:steps], weights


def make_predict(work: Work, weights: str) -> Callable[[np.ndarray], np.ndarray]:
    """For ``predict_batch_udf``: load the model, once a worker."""
    torch.set_num_threads(1)
    module = work.make()
    module.load_state_dict(torch.load(weights))
    module.eval()

    def predict(features: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(features)).numpy()

    return predict


def fit_and_predict(
    data: DataFrame, work: Work, batch: int, epochs: int, ranks: int, folder: Path
) -> dict[str, float]:
    """Seconds of each part, from the call to the predictions on ``data``."""
    began = time.time()
    path, out = str(folder / "train.parquet"), str(folder / "model.pt")
    data.write.parquet(path)
    written = time.time()
    # Each rank is a process that the task starts, and PySpark's workers have their own thread count.
    os.environ["OMP_NUM_THREADS"] = "1"
    runner = TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False)
    inside = runner.run(train_rank, work, path, batch, epochs, out)
    returned = time.time()
    features, _ = work.arrays(1)
    predict = predict_batch_udf(
        partial(make_predict, work, out),
        return_type=ArrayType(FloatType()),
        batch_size=1024,
        input_tensor_shapes=[list(features.shape[1:])],
    )
    predicted = data.withColumn("prediction", predict(NAMES[0]))
    predicted.write.format("noop").mode("overwrite").save()
    ended = time.time()
    return {
        "write Parquet": written - began,
        "start the ranks": inside["entered"] - written,
        "read Parquet": inside["read"] - inside["entered"],
        "train": inside["trained"] - inside["read"],
        "save, end the ranks": returned - inside["trained"],
        "predict": ended - returned,
        "whole": ended - began,
    }
