"""How a model is called, and which part of what it returns is its output."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import pytest
import torch
from mistakes import message_of
from structured import KINDS, AsDataclass, AsNamedTuple, Structured
from torch import nn

from sparkdl.data.fields import Field
from sparkdl.data.ragged import Padding
from sparkdl.errors import ModelError
from sparkdl.infer.forward import Forward, Trial, zeros_like
from sparkdl.metrics.named import resolve
from sparkdl.metrics.scorer import Scorer
from sparkdl.model.loss import ModelLoss
from sparkdl.model.recipe import (
    LiveReplica,
    Recipe,
    Signature,
    SparseInput,
    part_of,
    problems_of_part,
    with_tensors,
)
from sparkdl.replica.compute import MiniBatch, loss_of_output

LOGITS, HIDDEN = torch.arange(6.0).view(2, 3), torch.ones(2, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_what_a_model_returns(kind: str) -> None:
    returned = KINDS[kind](LOGITS, HIDDEN)
    name: Any = 0 if kind == "tuple" else "logits"
    assert part_of(returned, name) is LOGITS
    assert part_of(returned, None) is returned
    first = (lambda it: it[0]) if kind == "tuple" else (lambda it: part_of(it, "logits"))
    assert part_of(returned, lambda it: first(it)[:, 0]).tolist() == [0, 3]


@pytest.mark.parametrize(
    ("returned", "part", "told"),
    [
        (
            {"logits": LOGITS, "note": "x"},
            "logit",
            "output='logit': the model returned a dict of 'logits' [2, 3], 'note' str, which has no "
            'such part. Did you mean "logits"?',
        ),
        (
            (LOGITS, HIDDEN),
            2,
            "output=2: the model returned a tuple of 0 [2, 3], 1 [2, 8], which has no such part.",
        ),
        (
            AsNamedTuple(LOGITS, HIDDEN),
            "x",
            "output='x': the model returned an AsNamedTuple of 'logits' [2, 3], 'hidden' [2, 8], which "
            "has no such part.",
        ),
        (
            LOGITS,
            "T",
            "output='T': the model returned a tensor of shape [2, 3], which has no such part.",
        ),
        (
            LOGITS,
            0,
            "output=0: the model returned a tensor of shape [2, 3], which has no such part.",
        ),
    ],
)
def test_a_part_that_is_not_there(returned: Any, part: Any, told: str) -> None:
    assert message_of(ModelError, part_of, returned, part) == told


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_move_stay_in_what_holds_them(kind: str) -> None:
    returned = KINDS[kind](LOGITS, HIDDEN)
    moved = with_tensors(returned, lambda tensor: tensor + 1)
    assert type(moved) is type(returned)
    name: Any = 0 if kind == "tuple" else "logits"
    assert torch.equal(part_of(moved, name), LOGITS + 1)
    assert part_of(returned, name) is LOGITS
    if kind == "ModelOutput":
        assert torch.equal(moved["logits"], moved.logits)


def test_tensors_that_lie_deeper() -> None:
    for value in ("text", 3, None, math.inf):
        assert with_tensors(value, torch.neg) is value
    deep = with_tensors({"a": [(LOGITS, "x")], "b": MappingProxyType({"c": HIDDEN})}, torch.neg)
    assert torch.equal(deep["a"][0][0], -LOGITS)
    assert deep["a"][0][1] == "x"
    assert torch.equal(deep["b"]["c"], -HIDDEN)


def test_what_can_be_named() -> None:
    for part in (None, "logits", 0, len):
        assert problems_of_part(part) == []
    for part in (True, 1.5, ["logits"]):
        (told,) = problems_of_part(part)
        assert told == (
            f"output={part!r}: name a field of what the model returns, or give a function of it, "
            "or None."
        )


TARGETS = [torch.tensor([0, 2])]


def test_metrics_of_another_part_than_the_loss() -> None:
    returned = AsDataclass(LOGITS, HIDDEN)
    whole = Scorer(lambda it, target: it.hidden.sum(), tuple(resolve(["top@3"])), part="logits")
    assert whole.values(whole.update(whole.start(), returned, TARGETS)) == {"loss": 16, "top@3": 1}
    assert whole.apart


FIELDS = [Field("x", "float32", (2,))]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_prediction_holds(kind: str) -> None:
    part: Any = 0 if kind == "tuple" else "logits"
    module = Structured(kind=kind).eval()
    for chosen, finish, kind_of_it in (
        (part, None, ((3,), "float32", 2)),
        (None, lambda it: part_of(it, part).argmax(1), ((), "int64", None)),
    ):
        trial = Trial(Forward(module, Signature(("x",))), {"p": chosen}, "p", finish)
        ((column,), _) = trial.run(zeros_like(FIELDS), lambda count: iter([]))
        found = column.output.shape, column.output.dtype, column.dimensions
        assert (*found,) == kind_of_it


def test_what_is_no_prediction() -> None:
    forward = Forward(Structured(kind="dict").eval(), Signature(("x",)))
    trial = Trial(forward, {"p": None}, "p")
    assert message_of(ModelError, trial.run, zeros_like(FIELDS), lambda count: iter([])) == (
        "output \"p\" is a dict of 'logits' [2, 3], 'hidden' [2, 8] for a batch of 2 rows: it must be "
        "a tensor of shape [2, ...]. Name another part, output='logits', or output=function of what "
        "it returns."
    )


class Scores(nn.Module):
    """As many scores as there are candidates."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = nn.Buffer(torch.zeros(1))

    def forward(self, candidates: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return candidates.float()


@pytest.mark.parametrize("number", [0, 1])
def test_made_up_rows_of_several_sequences_hold_one_number(number: int) -> None:
    made = zeros_like([Field(name, "int64", (), Padding()) for name in "ab"], number=number)
    assert [set(rows.used.tolist()) for rows in made] == [{number}] * 2


def test_a_trial_goes_on_with_the_rows_of_the_data() -> None:
    """Which may be longer than those that were trained on; nothing stays of the trial."""
    made, asked, module = zeros_like([Field("candidates", "int64", (), Padding())]), [], Scores()

    def rows() -> Any:
        asked.append(True)
        yield [torch.arange(200).view(2, 100).numpy()]

    finish = lambda output: output.topk(10, dim=1).indices  # noqa: E731
    trial = Trial(Forward(module, Signature()), {"p": None}, "p", finish)
    assert trial.run(made, lambda count: rows())[0][0].output.shape == (10,)
    assert asked == [True]
    assert float(module.passes) == 0
    with pytest.raises(ValueError, match=r"postprocess fails on a tensor of shape \[2, 2\]"):
        trial.run(made, lambda count: iter([]))


@pytest.mark.parametrize("form", ["dense", "tensor", "indices"])
def test_vectors_are_made_of_their_entries(form: str) -> None:
    """Indices are exact for a model in half precision; entries may be unsorted, or come twice."""
    size, dense = 5000, torch.zeros(2, 5000)
    dense[0, 4999], dense[0, 3], dense[1, 1001] = 2.0, 1.0, 4.0
    entries = torch.tensor([[[4999, 2.0], [3, 0.5], [3, 0.5]], [[1001, 4.0], [0, 0], [0, 0]]])
    module: Any = nn.Linear(size, 2, bias=False, dtype=torch.bfloat16)
    wanted = module(dense.bfloat16())
    if form == "indices":
        weight, module = module.weight.T, nn.EmbeddingBag(size, 2, mode="sum", dtype=torch.bfloat16)
        module.weight = nn.Parameter(weight.contiguous())
        module.forward = lambda i, v: nn.EmbeddingBag.forward(module, i, per_sample_weights=v)
    signature = Signature((), None, (SparseInput(0, size, form),))
    found = Forward(module, signature).returned([entries.numpy()])
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    entries[0, 0, 0] = size
    with pytest.raises((ModelError, RuntimeError, IndexError), match="5000"):
        Forward(module, signature).returned([entries.numpy()])


class OwnLoss(Structured):
    """As the models of transformers: called with its labels, it returns its loss beside the logits."""

    def forward(self, *, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        returned = dict(super().forward(x=x))
        if labels is not None:
            returned["loss"] = nn.functional.cross_entropy(returned["logits"], labels)
        return returned


def test_a_model_that_computes_its_own_loss_of_inputs_by_keyword() -> None:
    """Its loss is given all that it returns; metrics are of the part."""
    loss, signature = ModelLoss(), Signature(("x",), "logits")
    live = LiveReplica.of(Recipe(OwnLoss(), loss, torch.optim.SGD, 0, signature=signature))
    batch = MiniBatch([torch.ones(2, 2)], TARGETS)
    with torch.no_grad():
        returned = signature.call_for_loss(loss, live.call, batch.inputs, batch.targets)
        value, count = loss_of_output(live, returned, batch)
        assert float(value) / (count or 1) == pytest.approx(float(returned["loss"]))
        scorer = Scorer(loss, tuple(resolve(["top@3"])), part="logits")
        values = scorer.values(scorer.update(scorer.start(), returned, TARGETS))
    assert values == {"loss": pytest.approx(float(returned["loss"])), "top@3": 1.0}
