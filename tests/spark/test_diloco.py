"""DiLoCo is what a plain PyTorch loop of the algorithm computes, also after losses and a resume."""

from __future__ import annotations

import copy
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import soak_but
from pyspark import cloudpickle
from small_networks import SAMPLES, LosesSlabs, close, network, normed, same
from torch import nn

import sparkdl

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
ROWS, STEPS, ROUNDS = 8, 2, 4
INNER = partial(torch.optim.AdamW, lr=0.05)
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def trainer(**changes: Any) -> sparkdl.Trainer:
    values = {
        "model": network(),
        "loss": nn.MSELoss(),
        "optimizer": INNER,
        "batch_size": 4,
        "replicas": 2,
        "consistency": sparkdl.DiLoCo(inner_steps=STEPS, outer_optimizer=OUTER),
        "stop": sparkdl.max_iteration(ROUNDS),
    }
    return sparkdl.Trainer(**{**values, **changes})


@pytest.fixture(scope="module")
def data(spark: Any) -> Any:
    rows = [sample for sample in SAMPLES for _ in range(ROWS)]
    return spark.sparkContext.parallelize(rows, 2)


def plain(keep: bool = True) -> nn.Module:
    """The algorithm; without ``keep`` the inner optimizers begin anew in each round."""
    shared = network()
    outer = OUTER(shared.parameters())
    copies = [copy.deepcopy(shared) for _ in SAMPLES]
    inner = [INNER(module.parameters()) for module in copies]
    for _ in range(ROUNDS):
        begin = [p.detach().clone() for p in shared.parameters()]
        for r, (module, (x, y)) in enumerate(zip(copies, SAMPLES, strict=True)):
            if not keep:
                inner[r] = INNER(module.parameters())
            module.load_state_dict(shared.state_dict())
            for _ in range(STEPS):
                inner[r].zero_grad()
                nn.functional.mse_loss(module(torch.tensor([x])), torch.tensor([y])).backward()
                inner[r].step()
        ends = zip(*(module.parameters() for module in copies), strict=True)
        for parameter, old, ended in zip(shared.parameters(), begin, ends, strict=True):
            parameter.grad = old - sum(end.detach() for end in ended) / len(SAMPLES)
        outer.step()
    return shared


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over the positive targets, and how many they are."""
    return ((output - target) ** 2)[target > 0].sum(), (target > 0).sum()


def test_it_is_the_algorithm(data: Any, set_stages: Any) -> None:
    """In every form and on "local", with the same bits."""
    trained = [trainer(engine="local").fit(data)]
    for stages in ("shuffle", "two", "one"):
        set_stages(stages)
        trained.append(trainer().fit(data))
    expected, anew = plain(), plain(keep=False)
    for one in trained:
        assert same(one.module, trained[0].module)
        pairs = zip(one.module.parameters(), expected.parameters(), anew.parameters(), strict=True)
        for found, wanted, other in pairs:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(found, other, rtol=1e-3)


@pytest.mark.gang
@pytest.mark.parametrize("strategy", soak_but(["zero1"], ["ddp", "zero1"]))
def test_a_gang_computes_the_same(data: Any, tmp_path: Path, strategy: str) -> None:
    """But for rounding; to the bit after a break, from a checkpoint that each engine reads."""
    checkpoint = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(2))
    run = trainer(engine="gang", strategy=strategy, checkpoint=checkpoint)
    whole, local = run.fit(data), trainer(engine="local").fit(data)
    assert whole.history.losses == pytest.approx(local.history.losses, rel=1e-5)
    close(whole.module, local.module, atol=1e-4)
    for resumed in (run, trainer(engine="local", checkpoint=checkpoint)):
        shutil.rmtree(sorted(tmp_path.iterdir())[-1])
        again = resumed.fit(data, resume="latest")
        close(again.module, local.module, atol=1e-4)
        assert resumed is not run or same(again.module, whole.module)


VARIED: dict[str, dict[str, Any]] = {
    "weights, norm": {"model": normed, "weight": "weight", "batch_size": 5},
    "counts, ranks without rows": {"loss": counted, "batch_size": 1, "accumulate": 2},
    "clipped, scheduled": {
        "clip_norm": 0.05,
        "schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        "ema": 0.9,
        "wire": "bf16",
    },
}


@pytest.mark.gang
@pytest.mark.parametrize("case", soak_but(["clipped, scheduled"], VARIED))
def test_a_gang_does_what_goes_with_it(spark: Any, case: str) -> None:
    """Rows differ in number and weight."""
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(rows, 5, generator=generator).tolist() for rows in (12, 8)]
    rows = [(row[:3], row[3:4], 1.0 + n % 3) for part in parts for n, row in enumerate(part)]
    frame = spark.createDataFrame(
        spark.sparkContext.parallelize(rows, 2),
        "features array<double>, label array<double>, weight double",
    )
    changes = {"stop": sparkdl.max_epoch(2), **VARIED[case]}
    most = 1e-2 if "wire" in changes else 1e-4
    there, here = (trainer(engine=name, **changes).fit(frame) for name in ("gang", "local"))
    assert there.history.losses == pytest.approx(here.history.losses, rel=most, nan_ok=True)
    close(there.module, here.module, most, most)


@pytest.mark.soak
def test_it_goes_on_after_a_loss_and_from_a_checkpoint(
    data: Any, slabs: Any, tmp_path: Path
) -> None:
    """The state of each replica's optimizer is part of it."""
    checkpoint = sparkdl.Checkpoint(str(tmp_path), every=sparkdl.every(2))
    whole, lost = trainer(checkpoint=checkpoint).fit(data), LosesSlabs(slabs, at=3)
    shutil.rmtree(sorted(tmp_path.iterdir())[-1])
    again = trainer(checkpoint=checkpoint).fit(data, resume="latest")
    assert same(again.module, whole.module)
    shutil.rmtree(tmp_path)
    disturbed = trainer(checkpoint=checkpoint, callbacks=[lost]).fit(data)
    assert lost.recoveries == 1
    assert same(disturbed.module, whole.module)
    local = trainer(engine="local", checkpoint=checkpoint).fit(data, resume="latest")
    assert same(local.module, whole.module)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (partial(torch.optim.SGD, lr=-1.0), r"^the outer_optimizer cannot be built .*rate: -1"),
        (torch.optim.SparseAdam, "^outer_optimizer: optimizer SparseAdam fails on a parameter"),
    ],
    ids=["rate", "dense"],
)
def test_an_outer_optimizer_that_does_not_fit(data: Any, optimizer: Any, said: str) -> None:
    with pytest.raises(sparkdl.ModelError, match=said):
        trainer(consistency=sparkdl.DiLoCo(outer_optimizer=optimizer)).fit(data)
