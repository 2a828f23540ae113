"""Models whose forward calls their modules in its own way, as chains of pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mistakes import message_of
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sparkdl import ModelError, ParameterError
from sparkdl.model.buffers import TrainingOptions
from sparkdl.parallel.base import Mesh
from sparkdl.parallel.pipeline import Pipeline, balanced
from sparkdl.parallel.trace import TracedStage, chain_of

WIDTH, LENGTH, WORDS = 8, 5, 11
TWO = Mesh(pipe=2)


class Language(nn.Module):
    """What forwards of transformers do: sizes, positions, a parameter and a buffer of its own, lists, a
    mask that is wanted by all layers, an argument that may be left out."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.shift = nn.Parameter(torch.randn(1, 2 * LENGTH, WIDTH))
        self.register_buffer("later", torch.triu(torch.full((9, 9), -1e9), 1))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        _, length = words.size()
        assert length <= self.later.shape[0]
        places = torch.arange(length, device=words.device)
        x = self.words(words) + self.places(places) + self.shift[:, :length]
        if scale is not None:
            x = x * scale[:, None, None]
        for layer in self.layers:
            x = layer(x, src_mask=self.later[:length, :length])
        return self.head(self.norm(x))


class Inside(nn.Module):
    """A model in a model, and a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.language = Language(2)
        self.out = nn.Sequential(nn.Linear(WORDS, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.language(words).mean(1))


class Torchs(nn.Module):
    """Torch's own stack of layers, whose forward has much to decide."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(x)[:, 0])


class Called(nn.Module):
    """Two layers and what a test does with them; ``again`` is called more than once."""

    def __init__(self, forward: Callable[[Called, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again, self.calls, self._forward = nn.Tanh(), 0, forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)


words = torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(1))
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], list[str]]] = {
    "lists": (
        Language,
        (words,),
        ["words", "places", "layers.0", "layers.1", "layers.2", "norm", "head"],
    ),
    "an input that may be left out": (
        Language,
        (words, torch.rand(4)),
        ["words", "places", "layers.0", "layers.1", "layers.2", "norm", "head"],
    ),
    "a model inside": (
        Inside,
        (words,),
        [
            *(f"language.{n}" for n in ("words", "places", "layers.0", "layers.1", "norm", "head")),
            *("out.0", "out.1", "out.2"),
        ],
    ),
    "torch's own": (
        Torchs,
        (torch.rand(4, LENGTH, WIDTH),),
        ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "out"],
    ),
    "called again": (
        lambda: Called(lambda m, x: m.again(m.second(m.again(m.first(m.again(x)))) + x)),
        (torch.rand(4, WIDTH),),
        ["again", "first", "second"],
    ),
    "as many zeros as rows": (
        lambda: Called(lambda m, x: m.second(m.first(x) + torch.zeros(x.shape[0], WIDTH))),
        (torch.rand(4, WIDTH),),
        ["first", "second"],
    ),
    "several out": (
        lambda: Called(lambda m, x: (m.first(x), m.second(x).argmax(1))),
        (torch.rand(4, WIDTH),),
        ["first", "second"],
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_the_pieces_one_after_another_are_the_model(case):
    """The same bits, the same gradients and the same parameters, in training and in evaluation."""
    made, inputs, names = MODELS[case]
    torch.manual_seed(3)
    module = made()
    items = chain_of(module, (), inputs)
    assert [name for name, _ in items] == names
    assert module.training
    held = [id(p) for _, item in items for p in item.parameters()]
    assert sorted(held) == sorted(id(p) for p in module.parameters())

    def by_pieces() -> Any:
        value: Any = inputs if len(inputs) > 1 else inputs[0]
        for _, item in items:
            value = item(value)
        return value

    for training in (True, False):
        module.train(training)
        found = []
        for call in (by_pieces, lambda: module(*inputs)):
            module.zero_grad()
            torch.manual_seed(5)
            out = call()
            several = out if isinstance(out, tuple) else (out,)
            sum(each.sum() for each in several if each.requires_grad).backward()
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            found.append([*several, *gradients])
        assert len(found[0]) == len(found[1])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@given(st.integers(1, 9))
def test_a_record_is_for_any_number_of_rows(rows):
    module = Language(1).eval()
    items = chain_of(module, (), [words])
    more = torch.randint(0, WORDS, (rows, LENGTH))
    value: Any = more
    for _, item in items:
        value = item(value)
    assert torch.equal(value, module(more))


def test_blocks_of_a_list_stay_whole_unless_they_are_cut_by_name():
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for each in self.blocks:
                x = x + each(x)
            return x

    inputs = [torch.rand(3, WIDTH)]
    assert [name for name, _ in chain_of(Blocks(), (), inputs)] == ["blocks.0", "blocks.1"]
    cut = chain_of(Blocks(), ["blocks.1.2"], inputs)
    assert [name for name, _ in cut] == ["blocks.0", "blocks.1.0", "blocks.1.1", "blocks.1.2"]
    named = Pipeline(split=["blocks.1"]).planned(Blocks(), inputs, TWO, TrainingOptions())
    assert named.split == ("blocks.1",)


def test_stages_begin_where_only_tensors_go_on():
    """The number of rows goes on from the first to the last of three layers."""

    def forward(m: Called, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        return m.second(m.again(m.first(x)).view(rows, WIDTH))

    inputs = [torch.rand(3, WIDTH)]
    items = chain_of(Called(forward), (), inputs)
    assert [name for name, _ in items] == ["first", "again", "second"]
    chosen = Pipeline().planned(Called(forward), inputs, TWO, TrainingOptions())
    assert chosen.split == ("second",)
    assert balanced([1.0, 9.0, 1.0], 2) == [0, 1]  # else it would begin with "again"
    with pytest.raises(ModelError, match='"first" puts out a int: cut elsewhere'):
        Pipeline(split=["again"]).planned(Called(forward), inputs, TWO, TrainingOptions())
    assert message_of(
        ParameterError, Pipeline().planned, Called(forward), inputs, Mesh(pipe=3), TrainingOptions()
    ) == (
        'strategy="pipeline" with 3 stages: the model is a chain of 2 parts between which only tensors '
        'go. Use fewer replicas, or copies of the pipeline, mesh={"data": ..., "pipe": ...}.'
    )


def test_activations_are_kept_of_what_is_called_as_a_whole():
    inputs = (words,)
    checkpointed = TrainingOptions(activation_checkpointing=("layers.*",))
    assert Pipeline().planned(Language(), inputs, TWO, checkpointed).split
    options = TrainingOptions(activation_checkpointing=("language",))
    with pytest.raises(ModelError, match='calls the members of "language" one by one'):
        Pipeline().planned(Inside(), inputs, TWO, options)


def test_parameters_that_become_others_go_back_where_they_are_from():
    module = Language(1)
    piece = next(p for _, p in chain_of(module, (), [words]) if "tensor0" in p._parameters)
    assert isinstance(piece, TracedStage)
    piece._parameters["tensor0"] = other = nn.Parameter(torch.zeros_like(module.shift))
    piece.hand_back()
    assert module.shift is other


def test_a_buffer_that_is_another_by_now_is_used():
    """As on its way to a device."""
    module = Language(1).eval()
    items = chain_of(module, (), [words])
    module._buffers["later"] = torch.zeros(9, 9)
    value: Any = words
    for _, item in items:
        value = item(value)
    assert torch.equal(value, module(words))


def test_a_device_that_forward_asks_for_is_where_its_inputs_are_by_now():
    def forward(m: Called, x: torch.Tensor) -> torch.Tensor:
        shift, here = torch.ones(WIDTH, device=x.device), x.device
        return m.second(m.first(x) + shift) + torch.ones(WIDTH, device=here)

    items = chain_of(Called(forward), (), [torch.rand(3, WIDTH)])
    assert len(items) == 2
    devices: list[torch.device] = []
    with Devices(devices):
        value: Any = torch.rand(3, WIDTH, device="meta")
        for _, item in items:
            value = item.to("meta")(value)
    assert devices == [torch.device("meta")] * 2


class Devices(TorchFunctionMode):
    """Notes where ones are made."""

    def __init__(self, found: list[torch.device]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ones:
            self.found.append(made.device)
        return made


def counted(m: Called, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return m.second(m.first(x) * m.calls)


def decided(m: Called, x: torch.Tensor) -> torch.Tensor:
    x = m.first(x)
    return m.second(-x if x.sum() > 0 else x)


MISTAKES: dict[str, tuple[Callable[[Called, torch.Tensor], Any], str]] = {
    "it looks at values": (
        decided,
        'strategy="pipeline" cuts a model between the modules that its forward calls, and cannot '
        "follow that of Called (test_follow.py, line {line}: symbolically traced variables cannot be "
        "used as inputs to control flow). Leave what depends on values to a module of its own, return "
        'nn.Sequential(...) of its layers from model(), or use strategy="fsdp".',
    ),
    "it looks whether it trains": (
        lambda m, x: m.second(functional.dropout(m.first(x), 0.5, m.training)),
        'strategy="pipeline" follows the forward of Called, which does something else in training than '
        "in evaluation, or with another number of rows: leave that to modules of their own, such as "
        "nn.Dropout instead of functional.dropout.",
    ),
    "it looks at the number of rows": (
        lambda m, x: m.second(m.first(x) / len(x)),
        "which does something else in training than in evaluation, or with another number of rows",
    ),
    "it keeps the number of rows": (
        lambda m, x: m.second(m.first(x) * torch.tensor([len(x)])),
        "and one after another they compute something else",
    ),
    "it keeps a tensor of so many rows": (
        lambda m, x: m.second(m.first(x) * torch.ones(len(x), 1)),
        "and one after another they compute something else",
    ),
    "it counts": (counted, "which does something else in training than in evaluation"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_followed_is_told(mistake):
    forward, message = MISTAKES[mistake]
    line = decided.__code__.co_firstlineno + 2
    assert message.format(line=line) in message_of(
        ModelError, chain_of, Called(forward), (), [torch.rand(3, WIDTH)]
    )
