"""Which layers are cut over ranks, and how."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from mistakes import message_of
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sparkdl import ModelError, Tensor
from sparkdl.parallel.tensor import _check_ways, plan_of


def cut(module: nn.Module, ranks: int = 2) -> dict[str, str]:
    return plan_of(Tensor(), module, ranks)


def test_layers_with_an_activation_between_them_are_pairs():
    module = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6)
    )
    assert cut(module) == {"0": "column", "3": "row"}


def test_a_layer_that_looks_at_all_of_its_input_parts_them():
    module = nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(1), nn.Linear(8, 2)
    )
    with pytest.raises(ModelError, match="finds no two"):
        cut(module)


def test_pairs_in_a_block_and_layers_of_transformers():
    block = nn.Sequential(OrderedDict(up=nn.Linear(4, 8), act=nn.GELU(), down=nn.Linear(8, 4)))
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    module = nn.Sequential(block, nn.TransformerEncoder(layer, 2), nn.Linear(4, 2))
    ways = {"0.up": "column", "0.down": "row"}
    for n in range(2):
        ways |= {f"1.layers.{n}.linear1": "column", f"1.layers.{n}.linear2": "row"}
    assert cut(module) == ways


def test_a_width_that_does_not_come_out_even_is_left_whole():
    module = nn.Sequential(
        nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 8), nn.ReLU()
    )
    module.append(nn.Linear(8, 2))
    assert cut(module) == {"4": "column", "6": "row"}
    assert cut(module, 3) == {"0": "column", "2": "row"}


def test_a_layer_with_parametrizations_is_left_whole():
    module = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 6)
    )
    assert cut(module.append(nn.Linear(6, 2))) == {"4": "column", "5": "row"}
    assert message_of(ModelError, _check_ways, Tensor(plan={"2": "row"}), module) == (
        'strategy=Tensor: "2" has parametrizations, which need its whole weight: leave it out of the '
        "plan."
    )


def test_layers_that_no_list_shows_are_no_pair():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 8), nn.Linear(8, 4)

    with pytest.raises(ModelError, match="finds no two"):
        cut(Two())


def test_patterns():
    module = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a1", "a2", "b")})
    plan = Tensor(plan={"a*": "column", "b": "row"})
    assert plan_of(plan, module, 2) == {"a1": "column", "a2": "column", "b": "row"}
