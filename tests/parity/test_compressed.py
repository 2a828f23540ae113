"""Training with compressed gradients is what plain PyTorch makes of the papers' formulas."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from feature_runs import (
    Parts,
    assert_close,
    assert_same_bits,
    copies,
    differ,
    fit_here,
    plainly,
    trainer_of,
)

import sparkdl
from sparkdl.data.epoch import derive_seed

pytestmark = pytest.mark.parity
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
SIZES = [((43,), 1), ((40, 3), 2), ((15, 14, 14), 5)]


def top_k(gradient, memory, seed, ratio):
    """Lin et al., 2018, without momentum correction: the threshold of the sorted magnitudes."""
    count = max(1, round(ratio * gradient.numel()))
    if gradient.ndim < 2 or count * 12 >= gradient.numel() * 8:
        return gradient, memory
    least = gradient.abs().flatten().sort(descending=True).values[count - 1]
    return torch.where(gradient.abs() >= least, gradient, 0.0), memory


def power_sgd(gradient, memory, seed, rank):
    """Vogels et al., 2019, algorithm 1, with one worker: the projection onto the span of M Q."""
    if gradient.ndim < 2 or rank * sum(gradient.shape) >= gradient.numel():
        return gradient, memory
    if memory is None:
        generator = torch.Generator().manual_seed(seed)
        memory = torch.randn(gradient.shape[1], rank, generator=generator, dtype=torch.float64)
    basis = torch.linalg.svd(gradient @ memory, full_matrices=False).U
    return basis @ (basis.T @ gradient), gradient.T @ basis


def compressing(trainer, formula, feedback=True):
    """Send of each gradient what ``formula`` says; the rest is added to the replica's next one."""
    residuals, memories = {}, {}

    def sent(gradient, t, m, n):
        seed = derive_seed(trainer.seed, "compression", t, m, n)
        gradient = gradient + residuals.get((m, n), 0.0)
        found, memories[m, n] = formula(gradient, memories.get((m, n)), seed)
        if feedback:
            residuals[m, n] = gradient - found
        return found

    return sent


@pytest.mark.parametrize(("sizes", "slices"), SIZES, ids=str)
@pytest.mark.parametrize(
    ("hook", "formula"),
    [
        (sparkdl.TopK(0.1), partial(top_k, ratio=0.1)),
        (sparkdl.PowerSGD(2), partial(power_sgd, rank=2)),
    ],
    ids=["top-k", "PowerSGD"],
)
def test_as_plain_pytorch(sizes, slices, hook, formula):
    parts = Parts.of(sizes)
    trainer = trainer_of(sizes, slices, optimizer=SGD, compression=hook)
    seen = fit_here(trainer, parts)
    assert_close(seen.steps, copies(trainer, parts, sent=compressing(trainer, formula))[0], 1e-9)
    forgetful = compressing(trainer, formula, feedback=False)
    assert differ(seen.steps, copies(trainer, parts, sent=forgetful)[0])
    assert differ(seen.steps, plainly(trainer, parts)[0])


@pytest.mark.parametrize("hook", [sparkdl.TopK(1.0), sparkdl.PowerSGD(99)], ids=str)
def test_what_leaves_nothing_out_changes_no_bit(hook):
    sizes = (15, 14, 14)
    plain, same = (
        fit_here(trainer_of(sizes, 3, compression=one), Parts.of(sizes)) for one in (None, hook)
    )
    assert_same_bits(plain.flats, same.flats)


def test_what_the_wire_rounds_off_is_fed_back():
    plain, same = (
        fit_here(trainer_of((22, 21), wire="bf16", compression=one), Parts.of((22, 21)))
        for one in (None, sparkdl.TopK(1.0))
    )
    assert differ(plain.steps, same.steps)


@pytest.mark.parametrize("hook", [sparkdl.TopK(0.1), sparkdl.PowerSGD(1)], ids=str)
def test_the_number_of_slices_changes_no_bit(hook):
    one, other = (
        fit_here(trainer_of((22, 21), slices, compression=hook, clip_value=0.1), Parts.of((22, 21)))
        for slices in (1, 5)
    )
    assert_same_bits(one.flats, other.flats)


# Mistakes


def too_few(bucket):
    return {"values": bucket.gradient.flatten()[:-1]}


def no_dictionary(bucket):
    return bucket.gradient


class WrongLater:
    """Its state does not fit what it does with it."""

    def __call__(self, bucket):
        kept = bucket.state.get("kept", torch.zeros(1)) @ torch.zeros(1)
        return {"values": bucket.gradient, "kept": kept}


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (too_few, r"ValueError: there are \d+ \"values\" of \d+, and no \"indices\""),
        (no_dictionary, "AttributeError: "),
        (WrongLater(), "RuntimeError: "),
    ],
)
def test_a_hook_that_fails(hook, said):
    trainer = trainer_of((22, 21), compression=hook)
    with pytest.raises(sparkdl.ModelError) as caught:
        fit_here(trainer, Parts.of((22, 21)))
    caught.match(r'compression fails on a gradient of "\d\.\w+" \[[\d, ]+\]: ' + said)
    caught.match("It is a function of a sparkdl.GradBucket that returns a dictionary of tensors")


class HoldsLock:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, bucket):
        return {"values": bucket.gradient}


def test_a_hook_that_cannot_travel():
    trainer = trainer_of((22, 21), compression=HoldsLock())
    with pytest.raises(sparkdl.ModelError, match="compression cannot be pickled"):
        fit_here(trainer, Parts.of((22, 21)))
