"""Starting weights, frozen parameters, activation checkpointing and compilation, on bare modules."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from mistakes import message_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparkdl
from sparkdl.errors import ModelError
from sparkdl.model.buffers import TrainingOptions
from sparkdl.model.preparation import (
    freeze,
    matches,
    matches_module,
    plain,
    prepared_forward,
    start_from,
)
from sparkdl.train.prepare import prepare


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
            "encoder2": nn.Linear(4, 4),
            "head": nn.Linear(4, 2),
        }
    )


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("encoder", "encoder.0.weight", True),
        ("encoder", "encoder2.weight", False),
        ("encoder.0", "encoder.0.bias", True),
        ("encoder.0", "encoder.01.bias", False),
        ("head.weight", "head.weight", True),
        ("*.weight", "encoder.0.weight", True),
        ("*.weight", "head.bias", False),
        ("encoder.?.bias", "encoder.0.bias", True),
        ("encoder.[1-9].bias", "encoder.0.bias", False),
        ("Head", "head.weight", False),
        ("*", "anything.at.all", True),
        ("weight", "head.weight", False),
    ],
)
def test_matches(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_a_module_is_matched_itself_and_not_through_its_parent() -> None:
    assert not matches_module("encoder", "encoder.0")
    assert matches_module("encoder.*", "encoder.0")
    assert matches_module("head", "head")


def test_a_tied_parameter_is_frozen_by_any_of_its_names() -> None:
    module = make()
    module["tied"] = nn.Linear(4, 2)
    module["tied"].weight = module["head"].weight
    freeze(module, ["tied.weight"], [])
    assert not module["head"].weight.requires_grad
    freeze(module, ["head"], ["tied"])
    assert module["head"].weight.requires_grad
    assert not module["head"].bias.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("head.bias"), 'the weights have no "head.bias"'),
        (lambda s: s.update({"haed.bias": torch.ones(2)}), 'no "haed.bias". Did you mean "head.bias"?'),
        (lambda s: s.update({"head.bias": torch.ones(3)}), 'is [3] in the weights and [2] in the'),
        (lambda s: s.clear(), "and 6 more"),
        (lambda s: s.update(x=s.pop("head.bias")), 'has no "x"; the weights have no "head.bias". To'),
    ],
    ids=["missing", "unknown", "shape", "many", "renamed"],
)  # fmt: skip
def test_strict_weights_must_fit(change, message) -> None:
    module, state = make(), make().state_dict()
    change(state)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    told = message_of(ModelError, start_from, module, state, strict=True)
    assert told.startswith("weights do not fit the model: ")
    assert message in told
    assert "strict_weights=False" in told
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_weights_may_have_the_names_of_a_compiled_module() -> None:
    state = {f"_orig_mod.{name}": torch.full_like(v, 3) for name, v in make().state_dict().items()}
    module = make()
    start_from(module, state, strict=True)
    assert all((v == 3).all() for v in module.state_dict().values())


class Tanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


@pytest.mark.parametrize("where", ["all", "a part"])
def test_a_compiled_module_is_the_plain_one_and_runs_compiled(where: str) -> None:
    compiled: list[str] = []
    torch.compiler.reset()  # a class of module is compiled only so often in a process

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(where)
        return graph.forward

    module = nn.Sequential(nn.Linear(3, 4), Tanh())
    names, x = list(module.state_dict()), torch.ones(2, 3)
    expected = module(x)
    if where == "all":
        found = plain(torch.compile(module, backend=backend))
    else:
        module[1] = torch.compile(module[1], backend=backend)
        found = plain(module)
    assert found is module
    assert list(found.state_dict()) == names
    assert type(found[1]) is Tanh
    found(x)
    assert not compiled
    assert torch.equal(prepared_forward(found, TrainingOptions())(x), expected)
    assert compiled == [where]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.first = nn.Linear(3, 4)
        self.second = Counted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)), factor=2.0)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        self.passes += 1
        return torch.tanh(self.layer(x)) * factor


def test_checkpointed_modules_compute_twice_and_give_the_same_gradients() -> None:
    x, found = torch.randn(5, 3), {}
    for patterns in ((), ("second",), ("second*",)):  # the last one matches what is inside too
        torch.manual_seed(0)
        module = Chain()
        call = prepared_forward(module, TrainingOptions(activation_checkpointing=patterns))
        assert call is module
        call(x).sum().backward()
        found[patterns] = [p.grad for p in module.parameters()]
        assert module.second.passes == (2 if patterns else 1)
        assert "forward" not in vars(module.second.layer), "it is no unit inside of a unit"
        with torch.no_grad():
            call(x)
        assert module.second.passes == (3 if patterns else 2), "without gradients: once"
    assert all(torch.equal(a, b) for a, b, c in zip(*found.values(), strict=True))
    assert all(torch.equal(a, c) for a, b, c in zip(*found.values(), strict=True))


class Halving(nn.Module):
    """It reads a buffer that each of its passes halves, and that another module has too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(3, 3), nn.Module()
        self.register_buffer("scale", torch.ones(()))
        self.other.register_buffer("scale", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other.scale /= 2
        return torch.tanh(self.layer(x) * self.scale.clone())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Halving()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, self.inner(x), use_reentrant=False)


def test_each_recomputation_reads_the_buffers_of_its_pass() -> None:
    """There are two passes before a backward, one module is inside another, and backward runs twice."""
    x, found = torch.randn(5, 3), []
    for patterns in ((), ("0",)):
        torch.manual_seed(0)
        module = nn.Sequential(Twice(), nn.Linear(3, 2))
        call = prepared_forward(module, TrainingOptions(activation_checkpointing=patterns))
        loss = call(x).sum() + call(2 * x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert module[0].inner.scale is module[0].inner.other.scale
        found.append([*(p.grad for p in module.parameters()), module[0].inner.scale])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_checkpointed_module_goes_with_its_last_user() -> None:
    """Without the collector, from which workers' replicas are hidden."""
    gc.disable()
    try:
        module = Chain()
        prepared_forward(module, TrainingOptions(activation_checkpointing=("second",)))(
            torch.randn(5, 3)
        ).sum().backward()
        weight = weakref.ref(module.second.layer.weight)
        del module
        assert weight() is None
    finally:
        gc.enable()


def test_a_checkpointed_module_may_be_compiled_by_its_user() -> None:
    torch.manual_seed(0)
    module, x = make()["encoder"], torch.randn(5, 3)
    whole = nn.Sequential(module, nn.Linear(4, 2))
    call = torch.compile(
        prepared_forward(whole, TrainingOptions(activation_checkpointing=("0",))),
        backend="aot_eager",
    )
    call(x).sum().backward()
    assert module[1].num_batches_tracked == 1


def test_the_copy_of_a_checkpointed_module_has_weights_of_its_own() -> None:
    """As a teacher that a model makes of itself."""
    module, x = Chain(), torch.randn(5, 3)
    prepared_forward(module, TrainingOptions(activation_checkpointing=("second",)))
    other, expected = copy.deepcopy(module), module(x)
    with torch.no_grad():
        module.second.layer.weight.zero_()
    assert torch.equal(other(x), expected)
    del module
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_compiling_in_place_is_told_not_to_travel(
    compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = nn.Sequential(nn.Linear(3, 4), Tanh())
    if compiled:
        module[1].compile(backend="eager")
    trainer = sparkdl.Trainer(model=module, loss=nn.MSELoss(), optimizer=torch.optim.Adam)
    prepare(trainer, None)
    told = [record.getMessage() for record in caplog.records if record.name == "sparkdl"]
    assert told == compiled * [
        'model is a module, and its "1" was compiled with .compile(), which is not sent to the '
        "executors: it is trained without compilation. Pass compile=True to compile it there."
    ]


class Extra(nn.Linear):
    """A module with state that no file of weights can hold."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_a_model_that_could_not_be_saved_is_told(caplog: pytest.LogCaptureFixture) -> None:
    trainer = sparkdl.Trainer(model=Extra(3, 4), loss=nn.MSELoss(), optimizer=torch.optim.Adam)
    prepare(trainer, None)
    assert 'could not be saved: state_dict() has "_extra_state", a dict, but' in " ".join(
        caplog.messages
    )
