"""Another process computes the same digest, and whatever a model depends on changes it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import fork_server
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from sparkdl.infer.source import as_module
from sparkdl.usercode.content import content_digest

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
SCALE = 1.0


class Kind(Enum):
    ONE = 1
    TWO = 2


class Scaled(nn.Module):
    sparkdl_no_state = ("seconds",)

    def __init__(self, k: Any = 1, seconds: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.k, self.seconds = k, seconds
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Otherwise(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


class Multiplied(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.k


def closure(k: Any) -> Callable[[Any], Any]:
    return lambda x: x * k


def with_default(k: Any) -> Callable[..., Any]:
    def function(x: Any, *, by: Any = k) -> Any:
        return x * by

    return function


def of_global(value: float) -> Any:
    """A function that names a global variable of this value."""
    code = (lambda x: x * SCALE).__code__
    return types.FunctionType(code, {"SCALE": value, "__name__": "__main__"})


def hooked(k: Any) -> nn.Module:
    module = Scaled()
    module.register_forward_hook(closure(k))
    return module


def exported(k: int) -> Any:
    return as_module(torch.export.export(Multiplied(k), (torch.ones(2),)))


def inside_itself(k: Any) -> list[Any]:
    found = [k]
    found.append(found)
    return found


MADE: dict[str, Callable[[int], Any]] = {
    "attribute": Scaled,
    "class": lambda k: Scaled() if k == 1 else Otherwise(),
    "weights": lambda k: nn.Linear(k, 1),
    "part": lambda k: nn.Sequential(Scaled(), Scaled(k)),
    "option of a layer": lambda k: nn.MultiheadAttention(4, k, dropout=0.0),
    "text of a layer": lambda k: nn.Upsample(2, mode=["nearest", "bilinear"][k - 1]),
    "parametrized": lambda k: parametrizations.weight_norm(nn.Linear(k, 2)),
    "hook": hooked,
    "TorchScript": lambda k: as_module(torch.jit.script(Multiplied(k))),
    "exported program": exported,
    "closure": closure,
    "default": with_default,
    "global variable": of_global,
    "partial": lambda k: functools.partial(torch.argmax, dim=k),
    "method": lambda k: Scaled(k).forward,
    "type": lambda k: [torch.float32, torch.float64][k - 1],
    "member of an enumeration": Kind,
    "number": lambda k: k,
    "number of NumPy": np.float32,
    "array": lambda k: np.arange(k),
    "array of objects": lambda k: np.array([k, None], dtype=object),
    "mapping": lambda k: {"k": [k]},
    "set": lambda k: {"some", "words", str(k)},
    "inside itself": inside_itself,
}


def digests() -> list[str]:
    """The digests of all that is made with 1, as this process computes them."""
    torch.manual_seed(0)
    return [content_digest([make(1)]) for make in MADE.values()]


@pytest.mark.parametrize("name", MADE)
def test_what_a_model_depends_on_changes_the_digest(name: str) -> None:
    found = []
    for k in (1, 1, 2):
        torch.manual_seed(0)
        found.append(content_digest([MADE[name](k)]))
    assert found[0] == found[1] != found[2]


def test_what_no_result_depends_on_does_not() -> None:
    assert content_digest([Scaled(seconds=1.0)]) == content_digest([Scaled(seconds=2.0)])
    assert content_digest([Scaled().eval()]) == content_digest([Scaled().train()])


def test_another_process_computes_the_same() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; import test_content as t; print(t.digests())"
    found = fork_server.run_fresh(code, __file__.rpartition("/")[0], *fork_server.PATHS)
    assert found.stdout.strip() == str(digests()), found.stderr
