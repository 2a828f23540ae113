"""What depends on the cut into replicas by its nature: batch norm, dropout, counters, low precision.

The reference here is a plain-PyTorch simulation of M copies on their parts of the batch.
"""

from __future__ import annotations

import copy
import itertools
from functools import partial

import parity_models as models
import pytest
import torch
from parity_reference import (
    Datasets,
    assert_same_bits,
    mini_batches,
    observe,
    one_thread,
    reference,
    simulate,
    worst_error,
)
from test_parity import row

import sparkdl

pytestmark = [pytest.mark.parity, pytest.mark.spark]

SCHEMA = "features array<double>, label long"
ADAM = partial(torch.optim.Adam, lr=1e-2, fused=False)  # the kernel of a plain loop


def trainer_of(model, optimizer=ADAM, **kwargs) -> sparkdl.Trainer:
    values = {"batch_size": 8, "loss": torch.nn.CrossEntropyLoss(), "seed": 5, **kwargs}
    return sparkdl.Trainer(model=model, optimizer=optimizer, **values)


@pytest.mark.parametrize(("engine", "slices"), [("local", 1), ("shuffle", 3)])
def test_batch_norm_on_one_replica_equals_torch_to_the_bit(datasets: Datasets, engine, slices):
    data = datasets.get((43,), row, SCHEMA)
    trainer = trainer_of(models.batch_normed, slices=slices)
    observed, expected = observe(trainer, data, engine), reference(trainer, data)
    for seen, wanted in zip(observed.steps, expected.steps, strict=True):
        assert seen.keys() == wanted.keys()
        for name, tensor in seen.items():
            assert torch.equal(tensor, wanted[name]), name
    trained = dict(observed.trained.module.named_buffers())
    assert int(trained["1.num_batches_tracked"]) == 10
    assert observed.losses == expected.losses


@pytest.mark.parametrize("sizes", [(30, 10), (24, 0)])
def test_batch_norm_on_two_replicas_averages_running_statistics(datasets, sizes):
    data = datasets.get(sizes, row, SCHEMA)
    trainer = trainer_of(models.batch_normed)
    observed, expected = observe(trainer, data, "shuffle"), simulate(trainer, data)
    assert worst_error(observed.steps, expected.steps) <= 1e-6
    assert_same_bits(observed.flats, observe(trainer, data, "local").flats)
    for t, seen in enumerate(observed.steps):
        assert int(seen["1.num_batches_tracked"]) == t + 1
        assert int(seen["4.num_batches_tracked"]) == t + 1


def test_buffers_that_are_no_floats_are_the_first_replicas(datasets):
    data = datasets.get((0, 30, 10), row, SCHEMA)
    trainer = trainer_of(models.Counting, slices=2)
    observed, expected = observe(trainer, data, "shuffle"), simulate(trainer, data)
    assert worst_error(observed.steps, expected.steps) <= 1e-6  # equal where not floating
    assert_same_bits(observed.flats, observe(trainer, data, "local").flats)
    last = dict(observed.trained.module.named_buffers())
    assert int(last["calls"]) == 10
    assert int(last["rows"][1]) == int(expected.steps[-1]["rows"][1]) > 10
    assert last["seen"].dtype == torch.bool
    assert last["seen"].any()
    assert last["table"].tolist() == [0, 1, 2, 3, 4]


def test_dropout_follows_seed_iteration_and_replica(datasets):
    data = datasets.get((20, 3, 0, 20), row, SCHEMA)
    trainer = trainer_of(models.dropped_out, slices=3)
    observed = observe(trainer, data, "shuffle")
    assert worst_error(observed.steps, simulate(trainer, data).steps) <= 1e-6
    assert_same_bits(observed.flats, observe(trainer, data, "shuffle").flats)
    assert_same_bits(observed.flats, observe(trainer, data, "local").flats)
    other = observe(trainer_of(models.dropped_out, slices=3, seed=6), data, "local")
    assert other.losses[0] != observed.losses[0]


def test_dropout_differs_between_iterations_and_replicas(datasets):
    """Replicas with 3 and 1 samples weigh 3/4 and 1/4: the step tells both masks apart."""
    data = datasets.get((30, 10), row_without_label, "features array<double>", label=())
    trainer = trainer_of(
        models.Noisy,
        partial(torch.optim.SGD, lr=1.0),
        loss=models.sum_of_rows,
        label=None,
        batch_size=4,
    )
    steps = [torch.zeros(64)] + [s["weight"] for s in observe(trainer, data, "shuffle").steps]
    masks = []
    for before, after in itertools.pairwise(steps):
        quarters = ((before - after) * 2).round().int()  # a kept element has gradient 2 * weight
        assert set(quarters.tolist()) <= {0, 1, 3, 4}
        masks += [quarters >= 3, quarters % 3 == 1]
    assert len({tuple(mask.tolist()) for mask in masks}) == 20
    assert 0.4 < torch.stack(masks).float().mean() < 0.6


def row_without_label(generator) -> tuple[list[float]]:
    return (generator.normal(size=models.WIDTH).tolist(),)


def test_low_precision_parameters_have_an_fp32_master_copy(datasets):
    """bf16 parameters round each step's result, but the next step starts from the master copy."""
    data = datasets.get((43,), row, SCHEMA)
    trainer = trainer_of(models.Low, partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    observed = observe(trainer, data, "shuffle")
    with one_thread():
        expected = _master_copy_training(trainer, data)
    for seen, wanted in zip(observed.steps, expected, strict=True):
        for name, tensor in seen.items():
            assert torch.equal(tensor, wanted[name]), name
    for name, parameter in observed.trained.module.named_parameters():
        assert parameter.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        assert torch.equal(parameter, observed.steps[-1][name].to(parameter.dtype))
    changed = [
        not torch.equal(a["first.weight"], b["first.weight"])
        for a, b in zip(observed.steps, observed.steps[1:], strict=False)
    ]
    assert all(changed)


def _master_copy_training(trainer, data) -> list[dict[str, torch.Tensor]]:
    with sparkdl_seed(trainer.seed):
        module = models.Low()
    masters = {n: p.detach().float().clone() for n, p in module.named_parameters()}
    optimizer = trainer.optimizer(list(masters.values()))
    steps = []
    for t in range(10):
        live = copy.deepcopy(module)
        with torch.no_grad():
            for name, parameter in live.named_parameters():
                parameter.copy_(masters[name])
        (part,) = mini_batches(trainer, data, t)
        trainer.loss(live(*part[0]), *part[1]).backward()
        for name, parameter in live.named_parameters():
            masters[name].grad = parameter.grad.float()
        optimizer.step()
        steps.append({name: master.clone() for name, master in masters.items()})
    return steps


def sparkdl_seed(seed: int):
    from sparkdl.process.determinism import seeded

    return seeded(seed)


def test_batch_norm_in_fp64(datasets):
    """Floating buffers keep their own dtype beside fp64 parameters."""
    data = datasets.get((30, 10), row, SCHEMA, float_dtype="float64")
    trainer = trainer_of(models.batch_normed_fp64, slices=3)
    observed, expected = observe(trainer, data, "shuffle"), simulate(trainer, data)
    assert worst_error(observed.steps, expected.steps) <= 1e-12
    assert observed.trained.module[1].running_mean.dtype == torch.float64
