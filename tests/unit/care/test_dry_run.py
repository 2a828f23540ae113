"""The rows of a dry run must give as a whole what they give in parts; a difference is told."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from dry_runs import dry_run
from torch import nn
from torch.nn.utils import parametrizations

from sparkdl.errors import in_quotes
from sparkdl.model.loss import StepLoss

ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def square(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["y"].square().mean() + output["balance"]
    return (output if torch.is_tensor(output) else output[0]).square().mean()


def told(caplog: pytest.LogCaptureFixture, part: str) -> list[bool]:
    """Whether each message is of a kind."""
    return [part in message for message in caplog.messages]


class OfClass(nn.Linear):
    calls: ClassVar[int] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OfClass.calls += 1
        return super().forward(x) / OfClass.calls


class Drawn(nn.Linear):
    """Draws from what ``draw`` draws from."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(4, 2)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.draw()


class Gradients(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]


def hooked() -> nn.Module:
    module, calls = nn.Linear(4, 2), [0]

    def divide(_: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return output / calls[0]

    module.register_forward_hook(divide)
    return module


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "a count in the class": (lambda: OfClass(4, 2), True),
    "a count in a hook": (hooked, True),
    "the system's random bytes": (
        lambda: Drawn(lambda: int.from_bytes(os.urandom(4), "big") / 2**32),
        True,
    ),
    "a new generator": (lambda: Drawn(lambda: np.random.default_rng().random()), True),
    "the global generators": (
        lambda: Drawn(lambda: random.random() + np.random.rand() + torch.rand(1)),
        False,
    ),
    "gradients of its inputs": (lambda: Gradients(4, 2), False),
    "inputs that it changes in place": (lambda: Through(lambda x: x.mul_(2)), False),
    "layers of torch": (
        lambda: nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(4, 8)),
            nn.BatchNorm1d(8),
            nn.Dropout(),
            nn.Unflatten(1, (2, 4)),
            nn.LSTM(4, 3, batch_first=True),
        ),
        False,
    ),
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_hidden_state_of_a_model_is_told(
    name: str, replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    make, hidden = MODELS[name]
    dry_run(make(), square, [ROWS], replicas=replicas)
    assert told(caplog, "another output when the same rows pass again") == [True] * hidden


def test_a_slow_count_of_a_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    calls = [0]

    def annealed(module: Any, batch: Any) -> torch.Tensor:
        calls[0] += 1
        return square(module(batch["x0"])) * (1 + 1e-6 * calls[0])

    dry_run(nn.Linear(4, 2), StepLoss(annealed, ("x0",), ()), [ROWS])
    assert told(caplog, "another output when the same rows pass again") == [True]


class Through(nn.Linear):
    """A layer of what ``change`` makes of the rows."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], outputs: int = 2) -> None:
        super().__init__(4, outputs)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.change(x))


class Padded(nn.Module):
    """A transformer of rows that are padded with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 4).long().clamp(max=8)
        words[:, 0] = 1
        return self.layer(self.table(words), src_key_padding_mask=words == 0)


class Experts(nn.Module):
    """Each row goes to the best of many experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        best = self.gate(x).argmax(1, keepdim=True)
        return {"y": self.experts(x).gather(1, best), "balance": self.gate(x).mean(0).var()}


MIXING: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "a mean": (lambda: Through(lambda x: x - x.mean(0)), True),
    "the largest": (lambda: Through(lambda x: x / x.abs().max()), True),
    "a softmax": (lambda: Through(lambda x: x.softmax(0)), True),
    "the first dimension as time": (lambda: nn.Sequential(nn.LSTM(4, 3)), True),
    "draws": (lambda: Through(lambda x: x + torch.randn_like(x)), False),
    "always six rows": (lambda: Through(lambda x: x.reshape(6, 4) - x.mean(0)), False),
    "no row each": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten(0)), False),
    "experts": (Experts, False),
    "padding": (Padded, False),
}


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_depend_on_others_are_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, mixes = MIXING[name]
    torch.manual_seed(0)
    dry_run(make(), square, [ROWS])
    assert told(caplog, "depends on the other rows of its mini-batch") == [True] * mixes


def normed(hook: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    module = nn.Linear(4, 2)
    module.weight.register_hook(hook)
    return module


@pytest.mark.parametrize(
    ("hook", "differs"), [(lambda g: g / g.norm(), True), (lambda g: g * 2, False)]
)
def test_a_hook_on_the_gradient_of_a_part_is_told(
    hook: Any, differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dry_run(normed(hook), square, [ROWS])
    assert told(caplog, 'the gradient of "weight" over the first rows') == [True] * differs


class Counts:
    calls = 0

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        self.calls += 1
        return x / self.calls


OWN = np.random.default_rng(1)
AUGMENTS: dict[str, tuple[Callable[..., Any], bool]] = {
    "a count": (Counts(), True),
    "a generator of its own": (lambda x, rng: x + OWN.random(), True),
    "its generator": (lambda x, rng: x + rng.random(), False),
    "the global generators": (
        lambda x, rng: x + random.random() + np.random.rand() + torch.rand(1).numpy(),
        False,
    ),
}


@pytest.mark.parametrize("name", AUGMENTS)
def test_augmenting_otherwise_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    augment, differs = AUGMENTS[name]
    dry_run(nn.Linear(4, 2), square, [ROWS], augment=augment)
    assert told(caplog, "augment returns something else") == [True] * differs


class Clamped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


class ScaledByFirstRows(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.begun:
            self.weight.data.div_(x.std(0))
            self.begun.fill_(True)
        return super().forward(x)


@pytest.mark.parametrize("kind", [nn.Linear, Clamped, ScaledByFirstRows])
def test_writing_to_weights_is_told(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    dry_run(kind(4, 2), square, [ROWS])
    assert told(caplog, 'writes to "weight", a trained') == [True] * (kind is not nn.Linear)


class Remembers(nn.Linear):
    """Has buffers, and ``change(buffers, rows)`` in each pass in training."""

    def __init__(self, change: Callable[[Any, torch.Tensor], object], **buffers: Any) -> None:
        super().__init__(4, 2)
        self.change = change
        for name, value in buffers.items():
            self.register_buffer(name, torch.as_tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.change(self, x.detach())
        return super().forward(x)


def queue(m: Any, x: torch.Tensor) -> None:
    m.rows = torch.cat([x, m.rows])[: len(m.rows)]
    m.place = (m.place + len(x)) % 64


def at_first(m: Any, x: torch.Tensor) -> None:
    if not m.ready:
        m.codes[:] = x[:2]
        m.ready.fill_(True)


def largest(m: Any, x: torch.Tensor) -> None:
    m.high = torch.maximum(m.high, x.amax(0))


ALONE = {"codes": torch.zeros(2, 4), "ready": False}
UNDECLARED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str], str]] = {
    "nothing": (lambda: nn.Linear(4, 2), {}, [], ""),
    "norms": (
        lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.SyncBatchNorm(2)),
        {},
        [],
        "",
    ),
    "of the weights alone": (lambda: parametrizations.spectral_norm(nn.Linear(4, 2)), {}, [], ""),
    "a count of passes": (lambda: Remembers(lambda m, x: m.n.add_(1), n=0), {}, [], ""),
    "of the first rows": (lambda: Remembers(at_first, **ALONE), {}, ["codes"], ""),
    "of too few rows": (
        lambda: Remembers(lambda m, x: m.codes.copy_(x[:5]), codes=torch.zeros(5, 4)),
        {},
        ["codes"],
        "",
    ),
    "a queue": (
        lambda: nn.Sequential(Remembers(queue, rows=torch.zeros(8, 4), place=0)),
        {},
        ["0.rows", "0.place"],
        "",
    ),
    "a count of rows": (
        lambda: Remembers(lambda m, x: m.n.add_(len(x)), n=0),
        {},
        ["n"],
        '{"n": "sum"}',
    ),
    "a range": (
        lambda: Remembers(largest, high=[-float("inf")] * 4),
        {},
        ["high"],
        '{"high": "max"}',
    ),
    "a mean of one's own": (
        lambda: Remembers(lambda m, x: m.mean.lerp_(x.mean(0), 0.1), mean=torch.zeros(4)),
        {},
        ["mean"],
        '{"mean": "mean"}',
    ),
    "beside a norm that rests": (
        lambda: nn.Sequential(
            nn.BatchNorm1d(4).eval(),
            Remembers(lambda m, x: m.mean.lerp_(x.mean(0), 0.1), mean=torch.zeros(4)),
        ),
        {},
        ["1.mean"],
        '{"1.mean": "mean"}',
    ),
    "what the trainer names": (lambda: Remembers(at_first, **ALONE), {"codes": "first"}, [], ""),
}


@pytest.mark.parametrize("name", UNDECLARED)
def test_buffers_that_rows_decide_are_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, rules, names, fitting = UNDECLARED[name]
    dry_run(make(), square, [ROWS], buffers=rules)
    assert len(caplog.messages) == bool(names)
    if names:
        (message,) = caplog.messages
        noun = "the buffers" if len(names) > 1 else "the buffer"
        assert message.startswith(
            f"each replica changes {noun} {', '.join(map(in_quotes, names))} by rows of its own, and "
            "after each iteration all have what the first has, as with torch's DDP, unless you say "
            f'how replicas agree: buffers={{"{names[0]}": "first"}} of the trainer, or '
        )
        with_them = f"On the first rows, one process has the same as with {fitting}."
        assert message.endswith(with_them if fitting else "a function of the stacked values.")


class Cached(nn.Linear):
    """Makes a cache in its first pass, with a mask for each number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "masks"):
            self.masks: dict[int, torch.Tensor] = {}
        return super().forward(x) * self.masks.setdefault(len(x), torch.ones(len(x), 1))


class Counted(nn.Linear):
    """Counts its passes, also those in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x)


class Codes(nn.Linear):
    """Gets its codes from the rows of its first pass, of which it needs two."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("codes", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.codes.copy_(torch.stack([x[0], x[1]]))
            self.ready.fill_(True)
        return super().forward(x - self.codes.mean(0))


class Beside(nn.Linear):
    """Returns something else beside its output."""

    def __init__(self, other: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(4, 2)
        self.other = other

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, self.other(y)


def backward_before() -> nn.Module:
    module = nn.Linear(4, 2)
    module(torch.ones(6, 4)).sum().backward()
    return module


def jagged(y: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([row[: 1 + i % 2] for i, row in enumerate(y)])


OF_STEP = StepLoss(lambda module, batch: square(module(batch["x0"])), ("x0",), ())
RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], dict[str, Any]]] = {
    "a cache for each number of rows": (lambda: Cached(4, 2), square, {}),
    "a cache in the model of a step": (lambda: Cached(4, 2), OF_STEP, {}),
    "gradients from building it": (backward_before, OF_STEP, {}),
    "a count of passes in both modes": (Counted, square, {}),
    "codes of the first rows, and a batch of one row": (
        Codes,
        square,
        {"counts": (3, 3), "buffers": {"ready": "max", "codes": "mean"}},
    ),
    "sparse values": (lambda: Beside(torch.Tensor.to_sparse), square, {}),
    "sparse rows": (lambda: Beside(lambda y: y.detach().to_sparse_csr()), square, {}),
    "rows of several lengths": (lambda: Beside(jagged), square, {}),
    "a tensor without rows, and none": (lambda: Beside(lambda y: (y[:0], y[:, :0])), square, {}),
}


@pytest.mark.filterwarnings("ignore")  # torch's, of what is in beta
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes_in_silence(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, loss, how = RIGHT[name]
    dry_run(make(), loss, [ROWS], build=make, **how)
    assert not caplog.messages


def passes(module: nn.Module, **how: Any) -> int:
    calls: list[nn.Module] = []
    module.register_forward_hook(lambda module, *_: calls.append(module))
    loss = nn.MSELoss()
    dry_run(module, loss, [ROWS], [ROWS[:, :2]], validated=True, **how)
    return len(calls)


@pytest.mark.parametrize(
    ("more", "how", "most"),
    [
        ([], {}, 6),
        ([], {"replicas": 1}, 7),
        ([], {"care": False}, 3),
        ([nn.Dropout()], {}, 10),
        ([nn.BatchNorm1d(2)], {}, 12),
    ],
    ids=str,
)
def test_passes_before_the_first_iteration(more: Any, how: Any, most: int) -> None:
    assert passes(nn.Sequential(nn.Linear(4, 2), *more), **how) <= most
