"""torch's settings of a process that travel with the tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from sparkdl.process.determinism import Numerics, put_back

CHANGES: list[Callable[[], None]] = [
    lambda: torch.set_default_dtype(torch.float64),
    lambda: torch.set_float32_matmul_precision("medium"),
    lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    lambda: setattr(torch.backends.cudnn, "benchmark", True),
    lambda: setattr(torch.backends.cudnn, "deterministic", True),
    lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    lambda: setattr(torch.backends.mkldnn, "enabled", False),
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = Numerics.here()
    yield
    before._set(Numerics.here())


@pytest.mark.parametrize("change", CHANGES)
def test_each_is_used_and_put_back(change: Callable[[], None]) -> None:
    plain = Numerics.here()
    change()
    wanted = Numerics.here()
    assert wanted != plain
    plain._set(wanted)
    assert Numerics.here() == plain
    wanted.use()
    assert Numerics.here() == wanted
    plain.use()  # another task's, where the one before did not put back
    wanted.use()
    assert Numerics.here() == wanted
    put_back()
    assert Numerics.here() == plain


def test_none_leaves_all_alone() -> None:
    before = Numerics.here()
    Numerics().use()
    put_back()
    assert Numerics.here() == before
