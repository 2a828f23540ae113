"""Two optimizers that take turns: a GAN in a loop of its own, on the ranks of ``sparkdl.gang.run``.

A ``Trainer`` updates all parameters at once by one loss. Here the discriminator and the generator have
losses against each other. Every rank has its own rows, and their gradients are averaged before each of
the two updates, so all ranks keep the same weights.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pyspark.sql import SparkSession
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import sparkdl


def ring(count: int) -> torch.Tensor:
    """Points near a circle of radius 2."""
    angle = torch.rand(count) * 2 * math.pi
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(count, 2)


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2),
        nn.Linear(32, outputs),
    )  # fmt: skip


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One update by the mean gradient of all ranks."""
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    mean = parameters_to_vector(gradients)  # in one message
    dist.all_reduce(mean)
    vector_to_parameters(mean / dist.get_world_size(), gradients)
    optimizer.step()


def train(rounds: int, rows: int) -> tuple[nn.Module, float]:
    """Runs on every rank."""
    torch.manual_seed(0)  # the same weights on every rank, and then rows of its own
    generator, discriminator = network(4, 2), network(2, 1)
    torch.manual_seed(1 + dist.get_rank())
    making = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    telling = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    for _ in range(rounds):
        real, made = ring(rows), generator(torch.randn(rows, 4))
        apart = F.softplus(-discriminator(real)) + F.softplus(discriminator(made.detach()))
        update(telling, apart.mean())
        update(making, F.softplus(-discriminator(made)).mean())
    return generator, sum(p.sum().item() for p in generator.parameters())


def main(spark: SparkSession, rounds: int = 600) -> dict[str, float]:
    found = sparkdl.gang.run(train, rounds, 128, ranks=2, spark=spark)
    (generator, one), (_, other) = found
    assert one == other, "ranks have the same weights"
    torch.manual_seed(5)
    with torch.no_grad():
        radius = generator(torch.randn(1000, 4)).norm(dim=1)
    near = float(((radius - 2).abs() < 0.5).float().mean())
    print(f"made points: {near:.3f} of them near the circle")
    return {"near": near}


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
