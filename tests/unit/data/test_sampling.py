"""The rows of an epoch that are drawn: how often each, where, and what cannot be drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mistakes import message_of

from sparkdl import Balanced, Weighted
from sparkdl.data.batches import BatchSpec, visit_order
from sparkdl.data.sampling import Draws, Sampling
from sparkdl.errors import DataError, ParameterError

GENERATOR = np.random.default_rng(7)
CLASSES = [GENERATOR.choice(4, size, p=[0.8, 0.15, 0.04, 0.01]) for size in (900, 0, 60, 340)]
WEIGHTS = [GENERATOR.gamma(1.0, size=len(c)) * (GENERATOR.random(len(c)) < 0.7) for c in CLASSES]


def partitions(how: Sampling) -> list[Any]:
    """By a class, or by a weight."""
    fields = CLASSES if isinstance(how, Balanced) else WEIGHTS
    return [
        SimpleNamespace(
            values=lambda _, v=values: v, order=range(len(values)), fields=(), name=str(m)
        )
        for m, values in enumerate(fields)
    ]


def draws_of(how: Sampling) -> Draws:
    fields = CLASSES if isinstance(how, Balanced) else WEIGHTS
    return how.draws(0, [how.tally(0).of(values) for values in fields])


def epoch(how: Sampling, number: int, seed: int = 3) -> list[np.ndarray]:
    """The rows of each replica in the epoch, copies with numbers of their own."""
    spec = BatchSpec(num_features=1, num_labels=1, seed=seed, draws=draws_of(how))
    return [visit_order(spec, part, number, m, 8) for m, part in enumerate(partitions(how))]


def rows_of(orders: list[np.ndarray]) -> list[np.ndarray]:
    return [order % max(1, len(CLASSES[m])) for m, order in enumerate(orders)]


@pytest.mark.parametrize("rows", [None, 7, 4003])
def test_each_class_has_the_same_share(rows: int | None) -> None:
    orders = epoch(Balanced("y", rows=rows), 0)
    drawn = np.concatenate([CLASSES[m][chosen] for m, chosen in enumerate(rows_of(orders))])
    counts = np.bincount(drawn, minlength=4)
    assert counts.sum() == (rows or 1300)
    assert counts.max() - counts.min() <= 1
    for order in orders:
        assert len(set(order.tolist())) == len(order), "each copy has a number"


def test_without_replacement_each_class_has_as_many_rows_as_the_rarest() -> None:
    how = Balanced("y", replacement=False)
    rarest = min(np.bincount(np.concatenate(CLASSES)))
    seen: list[set[int]] = []
    for number in range(3):
        orders = epoch(how, number)
        drawn = np.concatenate([CLASSES[m][order] for m, order in enumerate(orders)])
        assert np.bincount(drawn).tolist() == [rarest] * 4
        assert all(len(set(order.tolist())) == len(order) for order in orders)
        rare = [{*order[CLASSES[m][order] == 3].tolist()} for m, order in enumerate(orders)]
        assert rare == [{*np.flatnonzero(classes == 3).tolist()} for classes in CLASSES]
        seen.append({*orders[0].tolist()})
    assert seen[0] != seen[1] != seen[2], "the others are drawn anew"


def test_rows_are_drawn_in_proportion_to_their_weight() -> None:
    how, epochs = Weighted("w"), 400
    counts = [np.zeros(len(w)) for w in WEIGHTS]
    for number in range(epochs):
        for count, chosen in zip(counts, rows_of(epoch(how, number)), strict=True):
            np.add.at(count, chosen, 1)
    found, weights = np.concatenate(counts), np.concatenate(WEIGHTS)
    assert found.sum() == 1300 * epochs
    wanted = 1300 * epochs * weights / weights.sum()
    assert not found[weights == 0].any()
    assert np.abs(found - wanted).max() < 6 * np.sqrt(wanted.max())
    some = wanted > 100
    errors = (found[some] - wanted[some]) / np.sqrt(wanted[some])
    assert abs(errors.mean()) < 0.2
    assert 0.8 < errors.std() < 1.2


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_by_weight_without_replacement(share: float) -> None:
    most = int(sum(np.count_nonzero(w) for w in WEIGHTS))
    how = Weighted("w", replacement=False, rows=int(share * most))
    orders = epoch(how, 1)
    assert sum(map(len, orders)) == how.rows
    for weights, order in zip(WEIGHTS, orders, strict=True):
        assert len(set(order.tolist())) == len(order)
        assert (weights[order] > 0).all()
    chosen = np.concatenate([WEIGHTS[m][order] for m, order in enumerate(orders)])
    everyone = np.concatenate(WEIGHTS)
    assert share == 1.0 or chosen.mean() > 1.2 * everyone[everyone > 0].mean()


def test_without_replacement_a_weight_has_its_chance_in_any_partition() -> None:
    """Heavy rows, all of which are drawn, leave as much to the light ones beside them as elsewhere."""
    how, parts = Weighted("w", False, 1000), [[100.0] * 10 + [1.0] * 500, [], [1.0] * 1500]
    tallies = [how.tally(0).of(np.array(weights)) for weights in parts]
    heavy, _, light = how.draws(0, tallies).counts
    assert (heavy + light, heavy) == (1000, pytest.approx(10 + 990 / 4, abs=1))
    how, parts = Weighted("w", False, 4), [[1e300] * 2, [1e-200, 0.0], [5e-324] * 3]
    tallies = [how.tally(0).of(np.array(weights)) for weights in parts]
    assert how.draws(0, tallies).counts == (2, 1, 1)


@pytest.mark.parametrize("how", [Balanced("y"), Weighted("w"), Balanced("y", False)], ids=str)
def test_a_draw_is_a_function_of_seed_and_epoch(how: Sampling) -> None:
    def listed(number: int, seed: int) -> list[list[int]]:
        return [order.tolist() for order in epoch(how, number, seed)]

    assert listed(2, 3) == listed(2, 3)
    assert listed(2, 3) != listed(3, 3)
    assert listed(2, 3) != listed(2, 4)


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (Balanced, {"column": 3}, "Balanced: column=3: give the name of a column."),
        (Weighted, {"column": "w", "rows": 0},
         "Weighted: rows=0: give a whole number of at least 1, or None."),
        (Weighted, {"column": "w", "replacement": False},
         "Weighted: replacement=False: give rows=, the rows of an epoch; each row once is one without "
         "sampling."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told(kind: Any, given: dict[str, Any], text: str) -> None:
    assert message_of(ParameterError, kind, **given) == text


def test_what_cannot_be_drawn() -> None:
    told = message_of(DataError, draws_of, Balanced("y", replacement=False, rows=100))
    assert "a value has 15 rows and would need 25. Give at most rows=60, or draw with" in told
    told = message_of(DataError, draws_of, Weighted("w", replacement=False, rows=1200))
    assert "rows have a weight above 0. Give fewer rows, or draw with replacement." in told
    nothing = (np.array([0.0]), np.array([0, 5]))
    told = message_of(DataError, Weighted("w").draws, 0, [nothing])
    assert told == 'sampling=Weighted("w"): all weights are 0, so no row can be drawn.'
    many = np.arange(5000)
    told = message_of(DataError, Balanced("y").draws, 0, [(many, np.ones_like(many))])
    assert "more than 4,096 values. Balance over classes" in told
