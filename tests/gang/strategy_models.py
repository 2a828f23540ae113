"""Models that strategies cut, each in its way."""

from __future__ import annotations

import sys

import torch
from gang_training import CLASSES, WIDTH, without_norm
from pyspark import cloudpickle
from remembering import Seen
from torch import nn

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Spread(nn.Module):
    """A number for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, CLASSES).view(1, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Temper(nn.Module):
    """A parameter that is a single number, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.logit_scale.shape == ()
        return x * self.logit_scale.exp()


def tempered() -> nn.Module:
    return nn.Sequential(*layers(), Temper())


def layers() -> nn.Module:
    """Every strategy can cut it: a chain, of which two layers follow each other; every row by itself; a
    parameter of fewer rows than ranks."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.Tanh(),
        nn.Linear(16, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 1),
        Spread(),
    )


def paired() -> nn.Module:
    """Two layers that are cut, and others; an output of fewer rows than four ranks; a single number."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.Tanh(),
        nn.Linear(16, 7),
        nn.LayerNorm(7),
        nn.Linear(7, CLASSES),
        Temper(),
    )


def nested() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh()),
        nn.Linear(16, 8),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    )


def normed() -> nn.Module:
    """No bias before the normalisation: its gradient is all rounding, which Adam makes large."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.Tanh(),
        nn.Linear(16, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Linear(8, CLASSES),
    )


def remembering() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 8), Seen(8), nn.Linear(8, CLASSES)
    )


def in_place() -> nn.Module:
    """The second stage begins with what writes to its input, which torch takes for a leaf."""
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.Linear(8, CLASSES)
    )


def resting() -> nn.Module:
    """The norm stays in evaluation mode, with its statistics."""
    made = normed()
    made[3].eval().requires_grad_(False).running_mean.normal_()
    return made


class Fragile(nn.Module):
    """Its gradient is not a number where a score is high; what it puts out is what goes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fragile_where(x.detach() > 0.35, x)


def fragile_where(high: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + torch.sqrt(torch.where(high, x - x.detach(), 1.0)) - torch.where(high, 0.0, 1.0)


def fragile() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16),
        nn.Tanh(),
        nn.Linear(16, 8),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
        Fragile(),
    )


class FragileRow(nn.Module):
    """There is no gradient of a single number in one of the rows that idle ranks pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.temper = without_norm(), Temper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = ((x > 1.2) & (x < 1.24)).any(1, keepdim=True)
        return fragile_where(row, self.temper(self.layers(x)))


class Branch(nn.Module):
    """Which layers are used depends on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self.training or len(x) > 3:
            return self.left(x) + self.right(x)
        return self.left(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


class Own(nn.Module):
    """A forward of its own: a parameter and a buffer that are no layer's, whole numbers and a residual
    that go from the beginning to the end, a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.into = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.sign, self.out = nn.Embedding(2, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sign = (x.sum(1) > 0).long()
        begun = x = torch.tanh(self.into(x)) + self.shift
        for block in self.blocks:
            x = block(x) * self.scale
        return self.out(x + begun + self.sign(sign))


class Scaled(Own):
    """Two inputs."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1 + scale[:, None]))


class Sharp(Own):
    """A single number is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def hidden() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), Last(), Temper()
    )


class Last(nn.Module):
    """Layers that no Sequential shows."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Between(nn.Module):
    """Between two layers: a slope, a number and a gate, which are whole; the number elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, 12), nn.Linear(12, CLASSES), Last(1)
        self.into, self.slope = nn.Linear(WIDTH, 8), nn.PReLU()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(torch.tanh(self.into(x)))
        hidden = self.slope(self.up(x)) * gate
        hidden += self.scale
        return self.down(torch.cat([hidden * gate, hidden], 1)[:, hidden.shape[1] :]) * self.scale


def twice() -> nn.Module:
    """Two outputs for each class."""
    made = hidden()
    made[4] = Last(2 * CLASSES)
    return made


class Words(nn.Module):
    """A table and torch's transformer layer, without the biases of keys, which change nothing: their
    gradient would be all rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 8), nn.Linear(8, CLASSES)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(self.table(words(x))).mean(1))


class Normed(nn.Module):
    """A norm that each rank computes for a part of the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.norm = nn.Embedding(10, 8), nn.Identity(), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(self.table(words(x))))
        return self.down(torch.relu(self.up(x))).mean(1)


def words(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() * 3).long().clamp(max=9)


class Odd(nn.Module):
    """A model that is odd in the way that ``what`` says."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.out = nn.Linear(WIDTH, CLASSES)
        if what == "scalar":
            self.scale = nn.Parameter(torch.tensor(1.0))
        elif what == "double":
            self.layers[1].double()
        elif what == "shared":
            self.layers[1].weight = self.layers[0].weight
        elif what == "unused":
            self.spare = nn.Linear(2, 2)
        elif what == "sparse":
            self.table = nn.Embedding(4, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).float()
        return self.out(x) * getattr(self, "scale", 1.0)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(4, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.zeros(len(x), 1, dtype=torch.long))


def with_a_table() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2), nn.Sequential(Table(), nn.Linear(2, CLASSES)))


def tied() -> nn.Module:
    made = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)]
    made[1].weight = made[0].weight
    return nn.Sequential(*made)


class Shares(nn.Module):
    """A forward of its own that comes back to a tensor of its first layer, or to the layer itself."""

    def __init__(self, tensor: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)
        self.tensor = tensor
        if tensor:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.out(x if self.tensor else self.first(torch.tanh(x)))
