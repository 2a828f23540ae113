"""A check before the first iteration that the driver and the executors have built the same model.

Every process builds the recipe's model anew. A file that the recipe reads may be different there,
and so may the code of a module that it imports. Each process describes the model that it has built,
and the first difference is reported.

Values are compared bit for bit. If the bits differ, some of the values are compared as numbers: a
driver and executors with processors of different kinds may differ in the last bits of random
numbers that torch draws. That is harmless, because all executors start with the same values.

Numbers that only ``forward`` uses, such as a constant of a user's module, are not compared here;
:mod:`sparkdl.usercode` compares the code of the module's functions, and finds constants that were
changed in the driver's process. Comparing the output of ``forward`` for a fixed batch would reveal
some such numbers, but would be wrong for some models:

* A setting that has an effect in training only, such as the rate of a dropout, is not visible in an
  evaluation, and in training it is visible only as other random numbers.
* Outputs that are discontinuous, such as the index of a maximum or suppressed boxes, differ by more
  than rounding between two kinds of processors, and so do random numbers of a GPU.
* A pass changes state in Python attributes, such as a count of calls, so a replica that has made
  one is no longer the replica that plain PyTorch starts with. Another replica for this pass alone
  would take the memory of a model on each executor, and the time of a pass on the driver at the
  start of each fit.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sparkdl.errors import ModelError, UserError

SOME = 16
"""The number of values of a tensor that are compared as numbers."""
CLOSE = 1e-5
"""The permitted difference of two of these values, relative to the largest of them."""

logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class Described:
    """The description of a parameter or a buffer."""

    role: str
    shape: tuple[int, ...]
    dtype: str
    digest: bytes
    some: tuple[float, ...]  # evenly spread values; empty if they are no floating-point numbers

    def __str__(self) -> str:
        return f"a {self.role} {list(self.shape)} of {self.dtype}"

    def has_form_of(self, other: Described) -> bool:
        """Return whether the two have the same role, shape and dtype."""
        return (self.role, self.shape, self.dtype) == (other.role, other.shape, other.dtype)

    def is_close_to(self, other: Described) -> bool:
        """Return whether the sampled values of both differ at most by rounding."""
        if not self.some:
            return False
        one, two = (torch.tensor(each.some, dtype=torch.float64) for each in (self, other))
        bound = CLOSE * float(two.nan_to_num().abs().max())
        return torch.allclose(one, two, rtol=0.0, atol=bound, equal_nan=True)


Description = Mapping[str, Described]
"""The type of a module's description: its parameters and buffers, by name."""


def describe(module: nn.Module) -> Description:
    """Describe every parameter and buffer of a module as it is now."""
    found = {
        name: _described("trained parameter" if p.requires_grad else "frozen parameter", p)
        for name, p in module.named_parameters()
    }
    return found | {name: _described("buffer", b) for name, b in module.named_buffers()}


def _described(role: str, tensor: torch.Tensor) -> Described:
    values = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.blake2b(values.view(torch.uint8).numpy().data, digest_size=16).digest()
    some: tuple[float, ...] = ()
    if values.is_floating_point() and len(values):
        where = torch.linspace(0, len(values) - 1, min(SOME, len(values)), dtype=torch.float64)
        some = tuple(values[where.long()].double().tolist())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Described(role, tuple(tensor.shape), dtype, digest, some)


@dataclass(frozen=True)
class Compared:
    """The differences between the model that a process has built and the driver's model."""

    digest: str
    form: str = ""  # the first difference in names, shapes or types; "": none
    values: str = ""
    rounding: str = ""  # the first difference in last bits only


def compared(module: nn.Module, expected: Description) -> Compared:
    """Compare the ``module`` that this process has built with the driver's description."""
    found = describe(module)
    text = "\n".join(f"{name}: {one}, {one.digest.hex()}" for name, one in found.items())
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    form = values = rounding = ""
    for name in [*expected, *(name for name in found if name not in expected)]:
        here, there = expected.get(name), found.get(name)
        if here is None or there is None or not here.has_form_of(there):
            form = form or f'"{name}" is {here or "missing"} here, and {there or "missing"} there'
        elif here.digest != there.digest:
            text = f'the {here.role} "{name}" {list(here.shape)} has other values here than there'
            if here.some:
                text += f", {here.some[0]:.6g} and {there.some[0]:.6g} to begin with"
            if there.is_close_to(here):
                rounding = rounding or text
            else:
                values = values or text
    if not form and list(expected) != list(found):
        form = f"the order is {_order(expected)} here, and {_order(found)} there"
    return Compared(digest, form, values, rounding)


def _order(names: Description) -> str:
    return ", ".join(f'"{name}"' for name in list(names)[:5])


def check_same(compared: Sequence[Compared | UserError]) -> None:
    """Check that all processes have built the same model as the driver.

    Differences in rounding are only logged, as a warning. A UserError, which kept a process from
    building a model, is raised.
    """
    found: list[Compared] = []
    for one in compared:
        if isinstance(one, UserError):
            raise one
        found.append(one)
    for replica, one in enumerate(found):
        if one.form:
            raise ModelError(
                f"the executors build a different model than this process: {one.form} (replica "
                f"{replica}). Each process calls model() for itself, with the modules and files "
                "that it finds. If you changed a module here, save and reload it, or pass what "
                "model() needs as arguments (functools.partial); if it reads a file, ship that "
                "(spark.sparkContext.addFile). Or pass a module instance."
            )
    if len({one.digest for one in found}) > 1:
        raise ModelError(
            "model() gave different initial weights in different processes: draw them with "
            "torch, numpy or random only (all three are seeded), or pass a module instance."
        )
    for replica, one in enumerate(found):
        if one.values:
            raise ModelError(
                f"the executors start with different weights than this process: {one.values} "
                f"(replica {replica}). Each process calls model() for itself. If it reads a file, "
                "ship that (spark.sparkContext.addFile), or pass weights=; draw weights with "
                "torch, numpy or random only (all three are seeded); or pass a module instance."
            )
    rounding = next((one.rounding for one in found if one.rounding), "")
    if rounding:
        logger.warning(
            "the executors start with weights that differ slightly from those of this process, as "
            "on other types of processors: %s. Training starts with theirs; frozen parameters of "
            "the result are those of this process.",
            rounding,
        )
