"""Models on disk: by name where that is possible, a pickle only where it is not and never unasked."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import operator
import os
import random
import shutil
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum, IntFlag, StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from mistakes import message_of
from torch import nn
from trained import trained_model

import sparkdl
from sparkdl.data.partition_writer import Field
from sparkdl.data.ragged import Padding
from sparkdl.errors import ModelError, ParameterError, TrustError
from sparkdl.infer import remote, saved
from sparkdl.infer.model import TrainedModel, load
from sparkdl.infer.outputs import Output
from sparkdl.infer.saved import save
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.metrics.classes import Judging
from sparkdl.metrics.named import resolve, suited
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.preparation import start_from
from sparkdl.model.recipe import Signature
from sparkdl.process.determinism import seeded

# Recipes. This file is a module that can be imported, so these have a name.


class Net(nn.Module):
    """Parameters, running statistics, and arguments that shape it."""

    def __init__(self, width: int = 3, *, layers: list[int] | None = None) -> None:
        super().__init__()
        sizes = [2, *(layers or []), width]
        self.body = nn.Sequential(*map(nn.Linear, sizes, sizes[1:]))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))

    @staticmethod
    def narrow() -> Net:
        return Net(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


class Color(StrEnum):
    RED = "red"


class Size(IntEnum):
    BIG = 2


class Side(IntFlag):
    LEFT = 1
    RIGHT = 2


class Twins(nn.Module):
    """One block in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.left = self.right = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def make_net(width: int = 3) -> nn.Module:
    return Net(width)


def make_net_of_its_class(width: int = 3) -> Net:
    return Net(width)


def unannotated(width: int = 3):  # type: ignore[no-untyped-def]
    return Net(width)


def annotated_otherwise() -> object:
    return Net()


def annotated_as_maybe() -> nn.Module | None:
    return Net()


def annotated_with_nonsense() -> NoSuchName:  # type: ignore[name-defined]  # noqa: F821
    return Net()


def in_main() -> nn.Module:
    return nn.Linear(2, 3)


in_main.__module__ = "__main__"


def needed() -> nn.Module:
    return Net()


in_main_of_its_own = partial(lambda make: make(), needed)


def some_history() -> History:
    history = History()
    history.append(TrainState(samples=8, loss=0.5, seconds=1.5, learning_rates=(0.1,)), 1)
    history.append(TrainState(samples=16, loss=0.25, seconds=2.5, learning_rates=(0.1,)), 2)
    return history


def trained_on(model: Any, module: nn.Module | None = None, **changes: Any) -> TrainedModel:
    """As fit returns it: weights that the recipe alone would not give."""
    if module is None:
        module = model if isinstance(model, nn.Module) else model()
        with torch.no_grad():
            for i, value in enumerate(module.state_dict().values()):
                value.add_(i + 1)
    values: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "features": ("a", "b"),
        "label": ("y",),
        "fields": (Field("a", "float32", (2,)), Field("b", "int64", ()), Field("y", "float32", ())),
        "output": Output((3,), "float32"),
        "history": some_history(),
    }
    return trained_model(module, model=model, **{**values, **changes})


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = [one.state_dict(), other.state_dict()]
    return pairs[0].keys() == pairs[1].keys() and all(
        torch.equal(value, pairs[1][name]) for name, value in pairs[0].items()
    )


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


WITHOUT_PICKLE = {"model.json", "model.safetensors", "history.json"}

BY_NAME: dict[str, tuple[Callable[..., nn.Module], str, list[Any], dict[str, Any]]] = {
    "class": (Net, "Net", [], {}),
    "function": (make_net, "make_net", [], {}),
    "function annotated with its class": (make_net_of_its_class, "make_net_of_its_class", [], {}),
    "static method": (Net.narrow, "Net.narrow", [], {}),
    "partial": (partial(make_net, 5), "make_net", [5], {}),
    "with keywords": (partial(Net, 4, layers=[3, 2]), "Net", [4], {"layers": [3, 2]}),
    "twice": (partial(partial(Net, 4, layers=[9]), layers=[3]), "Net", [4], {"layers": [3]}),
}

ENCODED: dict[str, dict[str, Any]] = {
    "a dict with numbers as keys": {"names": {0: "no", 1: "yes"}},
    "a tuple": {"sizes": (3, 2), "deep": [{"a": (1, (2,))}]},
    "infinite numbers": {"low": -math.inf, "nested": {True: None}},
    "dtypes and classes": {"dtype": torch.float64, "parts": [nn.ReLU, Net]},
    "members of enums": {"one": Color.RED, "many": {"size": [Size.BIG]}},
}


def local_function() -> Callable[[], nn.Module]:
    def local() -> nn.Module:
        return Net()

    return local


BY_PICKLE: dict[str, tuple[Any, str]] = {
    "lambda": (lambda: Net(), "it is a lambda"),
    "local function": (local_function(), '"local" is defined inside a function'),
    "function in __main__": (in_main, '"in_main" is defined in the program or notebook itself'),
    "module": (nn.Sequential(nn.Linear(2, 3)), "it is a module, not a function that builds one"),
    "callable object": (
        operator.methodcaller("narrow"),
        "it is a methodcaller, not a class or a function",
    ),
    "partial with an argument of another kind": (
        partial(Net, layers=[3, {"a": Path("x")}]),
        "its argument \"layers\"[1]['a'] is a PosixPath",
    ),
    "partial with a lambda": (
        partial(Net, layers=[lambda x: x]),
        'its argument "layers"[0] cannot be named: it is a lambda',
    ),
    "flags together": (
        partial(Net, layers=[Side.LEFT | Side.RIGHT]),
        'its argument "layers"[0] is a Side',
    ),
    "subclass of a dict": (
        partial(Net, layers=OrderedDict()),
        'its argument "layers" is an OrderedDict',
    ),
    "partial of a lambda": (partial(lambda width: Net(width), 2), "it is a lambda"),
}


# Round trips


@pytest.mark.parametrize("row", BY_NAME)
def test_by_name_no_pickle_is_written_and_no_trust_needed(row: str, tmp_path: Path) -> None:
    model, name, args, kwargs = BY_NAME[row]
    trained = trained_on(model)
    (tmp_path / "notes.txt").write_text("another file does no harm")
    folder = save(trained, tmp_path)
    assert folder == tmp_path
    assert files(folder) == {*WITHOUT_PICKLE, "notes.txt"}
    assert json.loads((folder / "model.json").read_text())["recipe"] == {
        "kind": "name",
        "name": f"{__name__}:{name}",
        "args": args,
        "kwargs": kwargs,
    }
    loaded = load(folder)
    assert type(loaded.module) is Net
    assert same_weights(loaded.module, trained.module)
    plain = safetensors.torch.load_file(folder / "model.safetensors")
    assert plain.keys() == trained.module.state_dict().keys()


class Keeps(nn.Linear):
    """Whatever it is given."""

    def __init__(self, **given: Any) -> None:
        super().__init__(2, 3)
        self.given = given


@pytest.mark.parametrize("row", ENCODED)
def test_arguments_come_back_as_they_were(row: str, tmp_path: Path) -> None:
    """Also those that JSON alone would change, or not take: no pickle, no trust."""
    folder = save(trained_on(partial(Keeps, **ENCODED[row])), tmp_path)
    assert files(folder) == WITHOUT_PICKLE
    module: Any = load(folder).module
    assert repr(module.given) == repr(ENCODED[row])


def test_a_function_among_the_arguments_is_named_with_trust_only(tmp_path: Path) -> None:
    folder = save(trained_on(partial(Keeps, call=subprocess.call)), tmp_path)
    assert files(folder) == WITHOUT_PICKLE
    with pytest.raises(
        TrustError, match='names "subprocess:call", which is neither a module class'
    ):
        load(folder)
    assert load(folder, trust=True).module.given == {"call": subprocess.call}


@pytest.mark.parametrize(
    "told", [{"leaf": {"dtype": "nn"}}, {"leaf": {"x": "y"}}, {"dict": 3}, {"a": 1}, {"leaf": {}}]
)
def test_arguments_that_are_damaged(told: Any, tmp_path: Path) -> None:
    folder = save(trained_on(Net), tmp_path)
    tamper(folder, name=f"{__name__}:Net", args=[told])
    with pytest.raises(ModelError, match="is damaged: the arguments of its recipe"):
        load(folder)


@pytest.mark.parametrize("row", BY_PICKLE)
def test_by_pickle_trust_is_needed(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And saving says why, where no program can be stored: here it is called with two inputs."""
    model, why = BY_PICKLE[row]
    builds = "argument" not in why and row != "callable object"
    other = nn.Sequential(nn.Linear(2, 3)) if row == "module" else Net()  # its weights are saved
    trained = trained_on(model, None if builds and row != "module" else other)
    folder = save(trained, tmp_path)
    assert files(folder) == {*WITHOUT_PICKLE, "recipe.pkl"}
    (warning,) = (r.getMessage() for r in caplog.records if r.name == "sparkdl")
    assert warning.startswith(
        f"{folder}/recipe.pkl: the model is saved as a pickle, which sparkdl.load opens only with "
        f"trust=True, or with model=make_model: {why}. A class or function of a module that can be "
        "imported, or a partial of one with plain values, is built by its name. A program for "
        "predictions without its code cannot be stored beside it: TypeError: "
    )
    if not builds:
        return
    assert message_of(TrustError, load, folder) == (
        f"{folder} holds its model as a pickle, which can run any code when opened. Pass "
        "model=make_model to build the module yourself, or trust=True if you trust the file."
    )
    assert same_weights(load(folder, trust=True).module, trained.module)


def test_a_name_that_means_something_else_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redefined, or decorated: the name would give another function."""
    trained = trained_on(make_net)
    monkeypatch.setitem(globals(), "make_net", make_net_of_its_class)
    assert "recipe.pkl" in files(save(trained, tmp_path))


@pytest.mark.parametrize("without", [{}, {"label": (), "output": None}])
def test_everything_else_comes_back(without: dict[str, Any], tmp_path: Path) -> None:
    """From a path of any kind; but for the loss, which is given anew."""
    trained, loss = trained_on(Net, seed=5, **without), nn.MSELoss()
    loaded = sparkdl.load(trained.save(str(tmp_path / "deep" / "down")))
    for name in ("seed", "features", "label", "fields", "num_features", "float_dtype", "output"):
        assert getattr(loaded, name) == getattr(trained, name), name
    assert list(loaded.history) == list(trained.history)
    assert not loaded.module.training
    assert loaded.loss is None
    assert load(tmp_path / "deep" / "down", loss=loss).loss is loss


def test_what_was_loaded_can_be_saved(tmp_path: Path) -> None:
    trained = trained_on(partial(Net, 4, layers=[3]))
    first = save(trained, tmp_path / "first")
    second = save(load(first), tmp_path / "second")
    assert files(second) == WITHOUT_PICKLE
    assert (second / "model.json").read_text() == (first / "model.json").read_text()
    assert same_weights(load(second).module, trained.module)


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    trained = trained_on(Tied)
    folder = save(trained, tmp_path)
    assert len(safetensors.torch.load_file(folder / "model.safetensors")) == 1
    module: Any = load(folder).module
    assert module.head.weight is module.embed.weight
    assert same_weights(module, trained.module)


@pytest.mark.parametrize("model", [Tied, Twins])
def test_files_without_the_second_name_of_a_tensor_are_loaded(model: Any, tmp_path: Path) -> None:
    trained = trained_on(model)
    folder = save(trained, tmp_path)
    module: Any = load(folder).module
    assert same_weights(module, trained.module)
    assert len({id(value) for value in module.parameters()}) == len(list(module.parameters()))
    started = model()
    start_from(started, safetensors.torch.load_file(folder / "model.safetensors"), strict=True)
    assert same_weights(started, trained.module)


class Halves(nn.Module):
    """Two buffers that are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        whole = torch.arange(6.0)
        self.register_buffer("left", whole[:3])
        self.register_buffer("right", whole[3:])


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)

    def get_extra_state(self) -> dict:
        return {"calls": 3}

    def set_extra_state(self, state: dict) -> None:
        pass


def test_parts_of_one_tensor_are_stored_apart(tmp_path: Path) -> None:
    trained = trained_on(Halves)
    module: Any = load(save(trained, tmp_path)).module
    assert same_weights(module, trained.module)
    kept: Any = trained.module
    assert kept.left.untyped_storage().data_ptr() == kept.right.untyped_storage().data_ptr()


def test_state_that_is_no_tensor_is_told(tmp_path: Path) -> None:
    assert message_of(ModelError, save, trained_on(in_main, Extra()), tmp_path) == (
        'state_dict() has "_extra_state", a dict, but a safetensors file can hold only tensors: '
        "let get_extra_state() return a tensor, or register a buffer."
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_keep_their_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    module = nn.Linear(2, 3).to(dtype)
    folder = save(trained_on(in_main, module), tmp_path)
    loaded = load(folder, model=lambda: nn.Linear(2, 3, dtype=dtype))
    assert loaded.module.weight.dtype == dtype
    assert same_weights(loaded.module, module)


# What predictions and metrics depend on


class Random(nn.Module):
    """Draws of its own that no state_dict has; a buffer that comes with the first forward pass."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.register_buffer("angles", torch.randn(2, width), persistent=False)
        self.shift = random.random() + np.random.rand() + float(torch.rand(()))
        self.linear = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.rand(3), persistent=False)
        return self.linear(torch.cos(x @ self.angles + self.shift)) + self.cache


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("given", [None, Random, lambda: Random()])
def test_what_the_state_dict_lacks_comes_back(changed: bool, given: Any, tmp_path: Path) -> None:
    """The buffers as they are by then, other draws as of the seed."""
    with seeded(7):
        module = Random()
    inputs = torch.randn(5, 2)
    if changed:
        module.angles.mul_(2)
        module(inputs)
    folder = save(trained_on(Random, module, seed=7), tmp_path)
    assert files(folder) == {*WITHOUT_PICKLE, "buffers.safetensors"}
    random.seed(11)
    loaded: Any = load(folder, model=given)
    assert torch.equal(loaded.module.angles, module.angles)
    assert loaded.module.shift == module.shift
    if changed:
        assert torch.equal(loaded.module(inputs), module(inputs))
    save(loaded, folder, overwrite=True)
    assert "buffers.safetensors" in files(folder)


def test_buffers_without_a_place(tmp_path: Path) -> None:
    folder = save(trained_on(Random, Random()), tmp_path)
    data = (folder / "buffers.safetensors").read_bytes()
    other = {"shift": torch.rand(3)}
    safetensors.torch.save_file(other, folder / "buffers.safetensors")
    with pytest.raises(ModelError, match=r"buffers\.safetensors is not the file that was saved"):
        load(folder)
    (folder / "buffers.safetensors").write_bytes(data)
    other_model = nn.Sequential()
    other_model.linear = nn.Linear(4, 3)
    other_model.angles = nn.Identity()
    with pytest.raises(ModelError, match=f'no place for the buffer "angles" of {folder}'):
        load(folder, model=other_model)


JUDGED = {
    "probability": (nn.BCELoss(), [0.6, 0.2, 0.9, 0.4], [1.0, 0.0, 1.0, 1.0], 0.75),
    "its function": (nn.functional.binary_cross_entropy, [0.6, 0.2], [1.0, 0.0], 1.0),
    "logit": (nn.BCEWithLogitsLoss(), [0.6, 0.2], [1.0, 0.0], 0.5),
    "classes": (
        partial(nn.functional.cross_entropy, ignore_index=1),
        [[0.1, 0.9], [0.9, 0.1], [0.8, 0.2]],
        [1, 0, 0],
        1.0,
    ),
}


@pytest.mark.parametrize("row", JUDGED)
def test_accuracies_take_the_output_as_before(row: str, tmp_path: Path) -> None:
    """As the loss takes it, which is not saved; one that is given says it anew."""
    loss, output, label, expected = JUDGED[row]
    loaded = load(save(trained_on(Net, loss=loss), tmp_path))
    for one in (loaded, load(save(loaded, tmp_path / "again"))):
        scorer = Scorer(None, suited(resolve(["accuracy"]), one.loss, one.judging))
        states = scorer.update(scorer.start(), torch.tensor(output), [torch.tensor(label)])
        assert scorer.values(states) == {"accuracy": pytest.approx(expected)}
    assert load(tmp_path, loss=nn.BCELoss()).judging == Judging(threshold=0.5)


def test_the_default_dtype_may_be_another_by_then(tmp_path: Path) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        trained = trained_on(Net)
        folder = save(trained, tmp_path)
    finally:
        torch.set_default_dtype(before)
    loaded = load(folder)
    assert same_weights(loaded.module, trained.module)
    assert loaded.module.norm.running_mean.dtype == torch.float64


# A model given on loading


def test_a_model_that_is_given_needs_no_trust(tmp_path: Path) -> None:
    trained = trained_on(lambda: Net())
    folder = save(trained, tmp_path)
    (folder / "recipe.pkl").write_bytes(b"not even a pickle")
    loaded = load(folder, model=make_net)
    assert loaded.model is make_net
    assert same_weights(loaded.module, trained.module)
    module = Net()
    before = copy.deepcopy(module)
    assert same_weights(load(folder, model=module).module, trained.module)
    assert same_weights(module, before)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (partial(Net, 7), "size mismatch"),
        (partial(Net, layers=[3]), "Missing key(s) in state_dict"),
        (Tied, "Missing key(s) in state_dict"),
    ],
)
def test_a_model_that_does_not_fit(model: Any, complaint: str, tmp_path: Path) -> None:
    folder = save(trained_on(Net), tmp_path)
    told = message_of(ModelError, load, folder, model=model)
    assert told.startswith(f"the weights in {folder} do not fit the model: ")
    assert complaint in told


# Trust


@pytest.mark.parametrize(
    "model", [unannotated, annotated_otherwise, annotated_as_maybe, annotated_with_nonsense]
)
def test_a_function_that_does_not_say_what_it_makes_needs_trust(model: Any, tmp_path: Path) -> None:
    trained = trained_on(model)
    folder = save(trained, tmp_path)
    assert files(folder) == WITHOUT_PICKLE
    assert message_of(TrustError, load, folder) == refusal(folder, f"{__name__}:{model.__name__}")
    assert same_weights(load(folder, trust=True).module, trained.module)
    assert same_weights(load(folder, model=model).module, trained.module)


def refusal(folder: Path, name: str) -> str:
    return (
        f'{folder} names "{name}", which is neither a module class nor a function of yours that is '
        'annotated "-> torch.nn.Module". Annotate it, pass model=make_model, or pass trust=True.'
    )


def tamper(folder: Path, **recipe: Any) -> None:
    """What somebody may do to a folder on its way here."""
    path = folder / "model.json"
    content = json.loads(path.read_text())
    content["recipe"] = {"kind": "name", "args": [], "kwargs": {}, **recipe}
    del content["checksum"]
    path.write_text(json.dumps(content))


SOURCE = {"_code": "def forward(self, x): return x"}
NEVER_CALLED = [
    *("os:system", "posix:system", "subprocess:call", "subprocess:Popen", "builtins:eval"),
    *("builtins:exec", "runpy:run_path", "torch:load", "torch.hub:load", "pathlib:Path"),
    *(f"{__name__}:subprocess.call", f"{__name__}:Net.forward"),
    # These make code of what they are given; the last is annotated "-> torch.nn.Module".
    *("torch.fx:GraphModule", "torch.jit:ScriptModule"),
    "torch.fx.graph_module:reduce_graph_module",
    # Of sparkdl itself, with the same annotation: the first opens a pickle that it is given.
    *("sparkdl.train.prepare:build_model", "sparkdl.model.preparation:plain"),
    *("sparkdl.model.recipe:Recipe.build", "sparkdl.infer.source:ScriptedModule"),
]


@pytest.mark.parametrize("name", NEVER_CALLED)
def test_a_name_of_something_else_is_never_called(name: str, tmp_path: Path) -> None:
    folder = save(trained_on(Net), tmp_path)
    mark = tmp_path / "called"
    given: dict[str, Any] = {"args": [f"touch {mark}"]}
    if name.endswith("reduce_graph_module"):
        given = {"kwargs": {"body": SOURCE, "import_block": f"open({str(mark)!r}, 'w')\n"}}
    tamper(folder, name=name, **given)
    assert message_of(TrustError, load, folder) == refusal(folder, name)
    assert not mark.exists()


def test_with_trust_a_named_function_is_called(tmp_path: Path) -> None:
    """So that the tests above show a refusal, not a name that would not have worked anyway."""
    folder = save(trained_on(Net), tmp_path)
    mark = tmp_path / "called"
    tamper(folder, name="subprocess:call", args=[["touch", str(mark)]])
    with pytest.raises(ModelError, match="is an int: it must be a"):
        load(folder, trust=True)
    assert mark.exists()
    assert subprocess.call(["true"]) == 0


# Other folders


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("os:no_such_function", "module 'os' has no attribute 'no_such_function'"),
        (f"{__name__}:Net.wide", "type object 'Net' has no attribute 'wide'"),
        ("broken_module_of_the_tests:Net", "broken"),
    ],
)
def test_a_name_that_cannot_be_imported(
    name: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(trained_on(Net), tmp_path / "model")
    (tmp_path / "broken_module_of_the_tests.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    tamper(folder, name=name)
    assert message_of(ModelError, load, folder) == (
        f'{folder} names the model "{name}", which cannot be imported ({error}). Put it on the '
        "Python path, or pass model=make_model."
    )


@pytest.mark.parametrize("name", ["model.safetensors", "recipe.pkl"])
def test_a_file_that_is_not_the_one_that_was_saved(name: str, tmp_path: Path) -> None:
    folder = save(trained_on(lambda: Net()), tmp_path)
    (folder / name).write_bytes((folder / name).read_bytes()[:-1] + b"!")
    assert message_of(ModelError, load, folder, trust=True) == (
        f"{folder}/{name} is not the file that was saved: its checksum differs."
    )


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_a_model(make: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if make:
        folder.mkdir()
    assert message_of(FileNotFoundError, load, folder) == (
        f"{folder} is not a saved model of sparkdl (there is no model.json in it)."
    )


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"format": "other"}, "(format 'other', version 1)"),
        ({"version": 2}, "(format 'sparkdl-model', version 2)"),
        ({"format": None, "version": None}, "(format None, version None)"),
    ],
)
def test_another_format(change: dict[str, Any], shown: str, tmp_path: Path) -> None:
    folder = save(trained_on(Net), tmp_path)
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert message_of(ModelError, load, folder) == (
        f"{folder}/model.json is not a sparkdl-model of version 1 {shown}."
    )


def test_a_pickle_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(trained_on(in_main_of_its_own), tmp_path)
    monkeypatch.delitem(globals(), "needed")
    with pytest.raises(ModelError, match=r"recipe.pkl cannot be opened \(AttributeError: "):
        load(folder, trust=True)


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trained_on(Net).save("~/model") == tmp_path / "model"
    assert files(tmp_path / "model") == WITHOUT_PICKLE
    assert load("~/model").history is not None


def test_an_empty_path_is_told() -> None:
    told = "the path of the model is empty: name a folder."
    assert message_of(ParameterError, trained_on(Net).save, "") == told
    assert message_of(ParameterError, load, "") == told


# Overwriting


def test_a_model_is_not_replaced_unasked(tmp_path: Path) -> None:
    first = trained_on(Net)
    folder = save(first, tmp_path)
    assert message_of(FileExistsError, save, trained_on(partial(Net, 9)), folder) == (
        f"{folder} already holds a model: pass overwrite=True to replace it."
    )
    assert same_weights(load(folder).module, first.module)


def test_a_model_that_is_replaced_while_it_is_loaded(tmp_path: Path) -> None:
    first, second = trained_on(Net), trained_on(Net)
    with torch.no_grad():
        second.module.get_parameter(next(iter(dict(second.module.named_parameters())))).add_(1.0)
    folder, built = save(first, tmp_path), []

    def build() -> nn.Module:
        built.append(Net())
        if len(built) == 1:
            save(second, folder, overwrite=True)
        return built[-1]

    loaded = load(folder, model=build)
    assert len(built) == 2
    assert same_weights(loaded.module, second.module)
    assert not same_weights(loaded.module, first.module)


class Killed(BaseException):
    """The end of a process: nothing that it would do afterwards is done."""


class Life:
    """Counts what a process does to files, and ends it before or while it does the last thing."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise Killed

    @property
    def last(self) -> bool:
        return self.steps == 0


class TornFolder:
    """A folder of another file system, where a file that is being replaced is half there."""

    def __init__(self, folder: Path, life: Life) -> None:
        self.folder, self.life = folder, life

    def names(self) -> set[str]:
        return files(self.folder)

    def upload(self, file: Path, name: str) -> None:
        self.life.step()
        data = file.read_bytes()
        (self.folder / name).write_bytes(data[: len(data) // 2] if self.life.last else data)

    def download(self, name: str, file: Path) -> None:
        file.write_bytes((self.folder / name).read_bytes())

    def delete(self, name: str) -> None:
        self.life.step()
        (self.folder / name).unlink()


def killed_after(steps: int, at_uri: bool, folder: Path, trained: TrainedModel) -> bool:
    """Overwrite the model in the folder; return whether the process was killed."""
    life = Life(steps)
    with pytest.MonkeyPatch.context() as patched:
        if at_uri:
            patched.setattr(remote, "folder_at", lambda uri: TornFolder(folder, life))
        else:
            for owner, name in ((os, "replace"), (Path, "unlink"), (saved, "file_checksum")):
                patched.setattr(owner, name, stepping(getattr(owner, name), life))
        try:
            save(trained, "torn://model" if at_uri else folder, overwrite=True)
        except Killed:
            return True
    return False


def stepping(function: Callable[..., Any], life: Life) -> Callable[..., Any]:
    def stepped(*args: Any, **kwargs: Any) -> Any:
        life.step()
        return function(*args, **kwargs)

    return stepped


@pytest.mark.parametrize("at_uri", [False, True], ids=["path", "URI"])
def test_a_process_that_is_killed_while_it_replaces_a_model_leaves_one(
    at_uri: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of steps, and again where an earlier one was killed."""
    first, second = trained_on(lambda: Random()), trained_on(partial(Net, 9))
    start, steps, seen = save(first, tmp_path / "start"), 0, set()
    killed = True
    while killed:
        folder = Path(shutil.copytree(start, tmp_path / f"after-{steps}"))
        killed = killed_after(steps, at_uri, folder, second)
        torn = TornFolder(folder, Life(99))
        monkeypatch.setattr(remote, "folder_at", lambda uri, torn=torn: torn)
        for again in range(3):
            module = load("torn://model" if at_uri else folder, trust=True).module
            is_first = isinstance(module, Random)
            seen.add(is_first)
            assert same_weights(module, (first if is_first else second).module)
            if not killed:
                assert not is_first
            elif again < 2:
                killed_after(steps + again, at_uri, folder, second)
        save(second, folder, overwrite=True)
        assert files(folder) == WITHOUT_PICKLE
        steps += 1
    assert seen == {False, True}
    assert steps > 10


def test_two_that_replace_a_model_at_once_leave_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins while the first has replaced some files; it waits, and wins."""
    folder = save(trained_on(Net), tmp_path)
    models = [trained_on(lambda: Random()), trained_on(partial(Net, 9))]
    replace, second = os.replace, threading.Thread()

    def slowly(source: Path, target: Path) -> None:
        nonlocal second
        replace(source, target)
        if target.name == "model.json" and not second.ident:
            second = threading.Thread(target=save, args=(models[1], folder, True))
            second.start()
            second.join(0.5)

    monkeypatch.setattr(os, "replace", slowly)
    save(models[0], folder, overwrite=True)
    second.join()
    assert same_weights(load(folder).module, models[1].module)
    assert files(folder) == WITHOUT_PICKLE


def test_a_staged_file_is_found_beside_one_that_cannot_be_read(tmp_path: Path) -> None:
    """As a killed process leaves them, and only the one whose name has the digest is read."""
    trained = trained_on(Net)
    folder = save(trained, tmp_path)
    for name in ("model.json", "model.safetensors"):
        data = (folder / name).read_bytes()
        stem, _, suffix = name.partition(".")
        digest = hashlib.sha256(data).hexdigest()[:16]
        (folder / name).rename(folder / f"{stem}-{digest}.{suffix}")
        (folder / f"{stem}-{'0' * 16}.{suffix}").mkdir()
        (folder / f"{stem}-{'1' * 16}.{suffix}").symlink_to("nothing")
    assert same_weights(load(folder).module, trained.module)


def test_what_cannot_be_saved_leaves_the_model_before(tmp_path: Path) -> None:
    trained_on(make_net).save(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    for nameless in (
        {"columns": {"a": sparkdl.Convert(lambda value: value)}},
        {"signature": Signature((), lambda returned: returned[0])},
    ):
        for folder in ("model", "new"):
            with pytest.raises(ParameterError, match="cannot be saved by name"):
                trained_on(make_net, **nameless).save(tmp_path / folder, overwrite=True)
        assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
        assert not (tmp_path / "new").exists()


def first_of(returned: Any) -> Any:
    return returned[0]


@pytest.mark.parametrize("part", [None, "logits", 1, first_of])
def test_how_the_model_is_called_comes_back(tmp_path: Path, part: Any) -> None:
    signature = Signature(("x", "n", "n_lengths"), part)
    folder = trained_on(make_net, signature=signature).save(tmp_path)
    assert load(folder, trust=callable(part)).signature == signature
    content = json.loads((folder / "model.json").read_text())
    del content["checksum"]
    if callable(part):
        with pytest.raises(TrustError, match="names the function"):
            load(folder)
        content["part"] = [1]
    else:
        del content["inputs"], content["part"]  # as one was saved before there were such
    (folder / "model.json").write_text(json.dumps(content))
    if callable(part):
        with pytest.raises(ModelError, match="is damaged: part is a list"):
            load(folder, trust=True)
    else:
        assert load(folder).signature == Signature()


def test_specifications_may_hold_numbers_of_numpy(tmp_path: Path) -> None:
    columns = {
        "a": sparkdl.Sequence(max_length=np.int64(3), padding=np.float32(2)),
        "b": sparkdl.Image(size=[np.int64(8), 8], scale=np.float32(0.5)),
    }
    trained_on(make_net, columns=columns).save(tmp_path / "model")
    assert sparkdl.load(tmp_path / "model").columns == {
        "a": sparkdl.Sequence(max_length=3, padding=2.0),
        "b": sparkdl.Image(size=(8, 8), scale=0.5),
    }


class Pooled(nn.Module):
    """A model of sequences, called by keyword, which returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor, ids_lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.head(self.table(ids).sum(1) / ids_lengths[:, None])}


class TwoRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, 3)


class FiveRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(5, 3)


def test_an_exported_model_runs_without_its_code(tmp_path: Path) -> None:
    """For other numbers of rows, and other lengths, than it was exported with."""
    ids = Field("ids", "int64", (), Padding(lengths=True))
    names = Signature(("ids", "ids_lengths"), "y")
    model = trained_model(Pooled(), features=("ids",), fields=(ids,), signature=names)
    path = model.export(tmp_path / "pooled.pt2")
    module = torch.export.load(path).module()
    batch = {"ids": torch.arange(5)[None].repeat(3, 1), "ids_lengths": torch.tensor([5, 4, 5])}
    torch.testing.assert_close(module(**batch), model.module(**batch))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        model.export(path)
    with pytest.raises(ModelError, match=r"of TwoRows: RuntimeError: shape '\[2, 3\]' is invalid"):
        trained_model(TwoRows()).export(path, overwrite=True)
    with pytest.raises(
        ModelError, match="of FiveRows: its forward pass has made a constant of the"
    ):
        trained_model(FiveRows()).export(path, overwrite=True)
    with pytest.raises(ParameterError, match="is no path of a file in a folder that is there"):
        model.export(tmp_path / "none" / "pooled.pt2")
    assert [file.name for file in tmp_path.iterdir()] == ["pooled.pt2"]
    model.module.train()
    model.export(path, overwrite=True)
    assert model.module.training, "a trial has a copy of the module"
    with pytest.raises(ParameterError, match=r"use one of torch\.export, onnx"):
        model.export(path, "onxx")
