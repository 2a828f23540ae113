"""Recipes: the same model in every process, and the caller's random numbers left alone."""

from __future__ import annotations

import errno
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from mistakes import message_of
from torch import nn

from sparkdl.errors import ModelError, StaleReferenceError
from sparkdl.model.recipe import Recipe, optimizer_class, weights_digest
from sparkdl.process.determinism import seeded
from sparkdl.replica.run import RunSpec, install_recipe, open_replica
from sparkdl.slab.root import SlabConfig, open_root, remove_root, write_private


def random_net() -> nn.Module:
    """Draws from all three generators."""
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.weight[0, 0] = random.random()
        net.weight[0, 1] = float(np.random.rand())
    return net


def recipe(model: object = random_net, seed: int = 0) -> Recipe:
    return Recipe(model, nn.functional.mse_loss, torch.optim.SGD, seed)  # type: ignore[arg-type]


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


# Building


def test_two_builds_are_the_same() -> None:
    draw()
    first = weights_digest(recipe().build())
    draw()
    assert weights_digest(recipe().build()) == first
    assert weights_digest(recipe(seed=1).build()) != first


def test_a_module_is_its_own_recipe() -> None:
    module = random_net()
    assert recipe(module).build() is module


def test_what_builds_no_module_is_refused() -> None:
    assert message_of(ModelError, recipe(lambda: [1]).build) == (
        "model() returned a list: it must return a torch.nn.Module."
    )


def change(module: nn.Module, name: str) -> nn.Module:
    with torch.no_grad():
        module.state_dict(keep_vars=True)[name].reshape(-1)[-1] += 1
    return module


def test_a_digest_sees_every_parameter_and_buffer() -> None:
    def make() -> nn.Module:
        with seeded(0):
            net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).bfloat16())
        net[2].weight.requires_grad_(False)
        return net

    names = list(make().state_dict())
    assert len(names) == 9
    digests = {weights_digest(change(make(), name)) for name in names}
    assert len(digests | {weights_digest(make())}) == len(names) + 1


def test_a_digest_sees_names() -> None:
    weights = torch.ones(2)
    one, other = (nn.ParameterDict({name: weights.clone()}) for name in ("a", "b"))
    assert weights_digest(one) != weights_digest(other)


# Optimizers


class Wrapper:
    """Another kind of partial, as some libraries have it."""

    def __init__(self, func: object) -> None:
        self.func = func


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(module.parameters()), "lr": 0.5}])


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (torch.optim.Adam, torch.optim.Adam),
        (partial(torch.optim.Adam, lr=1.0), torch.optim.Adam),
        (partial(partial(torch.optim.SGD, lr=1.0), momentum=0.9), torch.optim.SGD),
        (Wrapper(partial(torch.optim.SGD, lr=1.0)), torch.optim.SGD),
        (make_optimizer, None),
        (partial(make_optimizer), None),
        (nn.Linear, None),
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), None),
        (None, None),
    ],
)
def test_the_class_behind_a_factory(factory: object, expected: type | None) -> None:
    assert optimizer_class(factory) is expected


def test_a_class_is_given_the_trainable_parameters() -> None:
    module = nn.Linear(3, 2)
    module.weight.requires_grad_(False)
    built = Recipe(module, torch.square, partial(torch.optim.SGD, lr=0.25), 0)
    (group,) = built.build_optimizer(module).param_groups
    assert group["lr"] == 0.25
    assert [id(p) for p in group["params"]] == [id(module.bias)]


# On a node


@pytest.mark.parametrize("gone", ["the recipe", "the root"])
def test_a_recipe_that_was_deleted_is_state_that_is_lost(tmp_path, gone) -> None:
    """Not an error of the user's: it is put there again when the replicas are placed anew."""
    slab = SlabConfig.new(str(tmp_path), f"app-{gone.split()[1]}")
    run = RunSpec(slab, 0, 1, 1, None, (1,), torch.get_num_threads())  # type: ignore[arg-type]
    install_recipe(run, [pickle.dumps(recipe(partial(nn.Linear, 3, 2)))])
    (directory,) = open_root(slab).directories
    (directory / "recipe").unlink()
    if gone == "the root":
        remove_root(slab)
    with pytest.raises(StaleReferenceError):
        open_replica(run)
    remove_root(slab)


def test_a_recipe_goes_where_there_is_room(tmp_path, monkeypatch) -> None:
    """Samples may have filled shared memory before it."""
    memory, local = tmp_path / "shm", tmp_path / "local"
    memory.mkdir()
    monkeypatch.setattr("sparkdl.slab.root.SHARED_MEMORY", memory)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(local))
    written = write_private

    def write(path, data) -> None:
        if path.is_relative_to(memory):
            path.write_bytes(b"the first ")
            raise OSError(errno.ENOSPC, "No space left on device")
        written(path, data)

    monkeypatch.setattr("sparkdl.replica.run.write_private", write)
    slab = SlabConfig.new("auto", "full")
    run = RunSpec(slab, 0, 1, 1, None, (1,), torch.get_num_threads())  # type: ignore[arg-type]
    for _ in range(2):
        install_recipe(run, [pickle.dumps(recipe(partial(nn.Linear, 3, 2)))])
    assert [path.name for path in (memory / slab.name).glob("recipe*")] == []
    assert [path.name for path in (local / slab.name).glob("recipe*")] == ["recipe"]
    assert open_replica(run).flat.module.weight.shape == (2, 3)
    remove_root(slab)


def test_threads_build_the_same_weights() -> None:
    """A driver may fit in several at once; torch has one generator."""
    made = recipe(lambda: nn.Sequential(*(nn.Linear(30, 30) for _ in range(20))))
    expected, before = weights_digest(made.build()), torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        found = [task.result() for task in [pool.submit(made.build) for _ in range(40)]]
    assert {weights_digest(module) for module in found} == {expected}
    assert torch.equal(torch.get_rng_state(), before)
