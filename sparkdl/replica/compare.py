"""Whether processes have built the same model: driver and executors, before the first iteration.

A recipe is built anew in every process. A file that it reads may be another one there, and so may the
code of a module that it imports. Each process describes what it has built, and the first difference is
told.

Values are compared bit for bit. Where the bits differ, some of the values are compared as numbers: a
driver and executors with processors of other kinds may differ in the last bits of what torch draws,
which harms nothing, as all executors begin with the same.

A number that only ``forward`` uses, such as a constant of a module of the user's, is not compared; the
code of its functions is (:mod:`sparkdl.usercode`). To compare what ``forward`` puts out for a fixed
batch would tell of some such numbers, and would be wrong of some models:

* What is there in training alone, such as the rate of a dropout, shows in no evaluation, and in
  training only as other random numbers.
* Outputs that jump, such as the index of a maximum or boxes that are suppressed, differ by more than
  rounding between processors of two kinds, and so does what a GPU draws.
* A pass changes what it keeps in Python attributes, such as a count of calls, and the replica that has
  made it would no longer be the one that plain PyTorch begins with; another replica for it alone takes
  the memory of a model on each executor, and the time of a pass on the driver at the start of each fit.
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
"""So many values of a tensor are compared as numbers."""
CLOSE = 1e-5
"""Of the largest of these: what two of them may differ by."""

logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class Described:
    """A parameter or a buffer: its role ("trained parameter", say), shape and type, the digest of its
    values, and some of them."""

    role: str
    shape: tuple[int, ...]
    dtype: str
    digest: bytes
    some: tuple[float, ...]

    def __str__(self) -> str:
        return f"a {self.role} {list(self.shape)} of {self.dtype}"

    def has_form_of(self, other: Described) -> bool:
        """Whether the two are alike but for their values."""
        return (self.role, self.shape, self.dtype) == (other.role, other.shape, other.dtype)

    def is_close_to(self, other: Described) -> bool:
        """Whether the values that are known of both differ by rounding at most."""
        if not self.some:
            return False
        one, two = (torch.tensor(each.some, dtype=torch.float64) for each in (self, other))
        bound = CLOSE * float(two.nan_to_num().abs().max())
        return torch.allclose(one, two, rtol=0.0, atol=bound, equal_nan=True)


Description = Mapping[str, Described]
"""Of a module: its parameters and buffers, by name."""


def describe(module: nn.Module) -> Description:
    """Every parameter and buffer as it is now."""
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
    """How a model that a process has built differs from that of the driver.

    ``digest``: of all that it has built. The others are the first difference of a kind, as a sentence
    or empty: ``form`` of names, shapes and types, ``values`` of values, ``rounding`` of last bits.
    """

    digest: str
    form: str = ""
    values: str = ""
    rounding: str = ""


def compared(module: nn.Module, expected: Description) -> Compared:
    """In another process: ``module`` beside what the driver has built."""
    found = describe(module)
    text = "\n".join(f"{name}: {one}, {one.digest.hex()}" for name, one in found.items())
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    form = values = rounding = ""
    for name in [*expected, *(name for name in found if name not in expected)]:
        here, there = expected.get(name), found.get(name)
        if here is None or there is None or not here.has_form_of(there):
            form = form or f'"{name}" is {here or "missing"} here, and {there or "missing"} there'
        elif here.digest != there.digest:
            told = f'the {here.role} "{name}" {list(here.shape)} has other values here than there'
            if here.some:
                told += f", {here.some[0]:.6g} and {there.some[0]:.6g} to begin with"
            if there.is_close_to(here):
                rounding = rounding or told
            else:
                values = values or told
    if not form and list(expected) != list(found):
        form = f"the order is {_order(expected)} here, and {_order(found)} there"
    return Compared(digest, form, values, rounding)


def _order(names: Description) -> str:
    return ", ".join(f'"{name}"' for name in list(names)[:5])


def check_same(told: Sequence[Compared | UserError]) -> None:
    """Raise :class:`sparkdl.ModelError` unless all processes have built what the driver has.

    ``told``: of each replica, in order; or the mistake that kept it from building any, which is raised.
    """
    found: list[Compared] = []
    for one in told:
        if isinstance(one, UserError):
            raise one
        found.append(one)
    for replica, one in enumerate(found):
        if one.form:
            raise ModelError(
                f"the executors build another model than this process: {one.form} (replica {replica}). "
                "Each process calls model() for itself, with the modules and files that it finds. "
                "Where a module was changed here, save and reload it, or give model() what it needs as "
                "arguments (functools.partial); where it reads a file, ship that "
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
                "the executors begin with other weights than this process: "
                f"{one.values} (replica {replica}). Each process calls model() for itself. Where it "
                "reads a file, ship that (spark.sparkContext.addFile), or give weights=; draw weights "
                "with torch, numpy or random only (all three are seeded); or pass a module instance."
            )
    rounding = next((one.rounding for one in found if one.rounding), "")
    if rounding:
        logger.warning(
            "the executors begin with weights that differ a little from those of this process, as "
            "on processors of another kind: %s. Training begins with theirs; frozen parameters of "
            "the result are those of this process.",
            rounding,
        )
