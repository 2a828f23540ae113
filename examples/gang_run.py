"""Any torch.distributed function inside Spark: here, the power method on a matrix cut into rows.

Every rank holds some rows of a large symmetric matrix and knows nothing of the others'. One product of
matrix and vector is a product of each rank's own and one all-gather.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from pyspark.sql import SparkSession

import sparkdl


def largest_eigenvalue(size: int, rounds: int) -> float:
    """Runs on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    vectors = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(rank * size // world, (rank + 1) * size // world)
    mine = vectors[rows] @ vectors.T  # these rows of a matrix of rank 4
    vector = torch.ones(size)
    for _ in range(rounds):
        parts = [torch.empty(len(mine)) for _ in range(world)]
        dist.all_gather(parts, mine @ vector)
        product = torch.cat(parts)
        vector = product / product.norm()
    print(f"{len(mine)} rows here")
    return float(product.norm())


def main(spark: SparkSession, size: int = 1024) -> dict[str, float]:
    found = sparkdl.gang.run(largest_eigenvalue, size, 50, ranks=2, output=True, spark=spark)
    vectors = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.matrix_norm(vectors, 2)) ** 2
    agreement = min(found) / exact
    print(f"the ranks found {found}: {agreement:.3f} of the exact value")
    return {"agreement": agreement}


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
