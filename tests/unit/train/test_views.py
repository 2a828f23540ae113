"""What a notebook or a console shows of a trainer and a trained model."""

from __future__ import annotations

from functools import partial
from html.parser import HTMLParser

import summary_runs as runs
import torch
from torch import nn
from trained import trained_model

import sparkdl
from sparkdl.data.fields import Field


class Cells(HTMLParser):
    """The text of a page's cells; every tag must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Nothing is opened."""

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_a_trainer_shows_what_differs_from_the_defaults() -> None:
    trainer = runs.a_trainer(
        features=["a", "b"], seed=3, stop=sparkdl.max_epoch(10), weights={"<w>": torch.zeros(9)}
    )
    assert repr(trainer) == (
        "Trainer(model=torch.nn.modules.linear:Linear(3, 1), "
        "loss=torch.nn.modules.loss:MSELoss (a module), "
        "optimizer=torch.optim.sgd:SGD(lr=0.5, momentum=0.25), features=['a', 'b'], "
        "weights={<w>: torch:Tensor}, seed=3)"
    )
    cells = Cells(trainer._repr_html_()).cells
    assert cells[::2] == ["model", "loss", "optimizer", "features", "weights", "seed"]
    assert cells[-3] == "{<w>: torch:Tensor}"


def test_a_secret_is_not_shown() -> None:
    trainer = runs.a_trainer(
        model=partial(dict, api_key="hunter2", max_tokens=512),
        checkpoint=sparkdl.Checkpoint("s3://me:hunter2@bucket/a"),
    )
    assert "hunter2" not in repr(trainer) + trainer._repr_html_()
    assert "max_tokens=512" in repr(trainer)


def test_a_trained_model_shows_fields_curves_and_timings() -> None:
    history = sparkdl.History()
    for state in runs.states()[1:]:
        history.append(state, state.epoch + 1)
        if state.position == 0:
            for validated in state.validations[-1:]:
                history.append_validation(validated)
    fields = (Field("x", "float32", (3,)), Field("y", "int64", ()))
    made = partial(nn.Linear, 3, 1)
    trained = trained_model(made(), model=made, label=("y",), fields=fields, history=history)
    shown = trained._repr_html_()
    cells = Cells(shown).cells
    assert "sparkdl.TrainedModel: Linear of 4 parameters" in shown
    first = cells.index("x")
    assert cells[first : first + 6] == ["x", "feature", "float32[3]", "y", "label", "int64"]
    assert "validation accuracy (iteration 8)" in cells or "validation loss (iteration 4)" in cells
    assert cells[cells.index("forward") + 3] == "50%"
    assert shown.count("<svg") == 2
