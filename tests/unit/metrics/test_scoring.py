"""Loss and metrics as states: any cut of the data gives what one pass gives."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fork_server import run_fresh
from hypothesis import given, settings
from hypothesis import strategies as st
from lazily import Lazily
from mistakes import message_of
from torch import nn

from sparkdl.errors import ParameterError
from sparkdl.metrics.base import MeanMetric
from sparkdl.metrics.classes import BINS
from sparkdl.metrics.named import resolve, suited
from sparkdl.metrics.scorer import MetricOf, Scorer, States
from sparkdl.metrics.scores import best_threshold
from sparkdl.model.loss import MaskedLoss

pytestmark = pytest.mark.filterwarnings("ignore:Metric .Spearman")

sk, tm = Lazily("sklearn.metrics"), Lazily("torchmetrics")
calibration = Lazily("sklearn.calibration")
ROWS, CLASSES = 60, 3
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(ROWS, CLASSES, generator=GENERATOR)
LABELS = torch.randint(0, CLASSES, (ROWS,), generator=GENERATOR)
VALUES = torch.randn(ROWS, generator=GENERATOR)
BINARY = (torch.randn(ROWS, generator=GENERATOR) > 0).long()
WHOLE = [[(0, ROWS)]]


def folded(scorer: Scorer, output: torch.Tensor, target: torch.Tensor, parts: Any) -> States:
    """``parts``: for each partition, the bounds of its batches."""
    many = []
    for part in parts:
        states = scorer.start()
        for a, b in part:
            states = scorer.update(states, output[a:b], [target[a:b]])
        many.append(pickle.loads(pickle.dumps(states)))
    return scorer.merge(many)


@st.composite
def cuts(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Partitions of batches, some of them empty, that make up all rows in order."""
    inner = draw(st.lists(st.integers(1, ROWS - 1), max_size=8, unique=True))
    batches = list(itertools.pairwise(sorted({0, ROWS, *inner})))
    bounds = sorted([0, len(batches), *draw(st.lists(st.integers(0, len(batches)), max_size=3))])
    return [batches[a:b] for a, b in itertools.pairwise(bounds)]


@settings(deadline=None, max_examples=40)
@given(cuts())
def test_any_cut_gives_what_one_pass_gives(parts: Any) -> None:
    names = ["accuracy", "top@2", "hit_ratio@2", "ndcg@2"]
    scorer = Scorer(nn.CrossEntropyLoss(), tuple(resolve(names)))
    found = scorer.values(folded(scorer, SCORES, LABELS, parts))
    assert list(found) == ["loss", *names]
    assert found == pytest.approx(scorer.values(folded(scorer, SCORES, LABELS, WHOLE)), rel=1e-6)
    expected = nn.functional.cross_entropy(SCORES, LABELS)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)
    binary = Scorer(None, tuple(resolve(["auc", "mae", "mse"])))
    assert binary.values(folded(binary, VALUES, BINARY, parts))["auc"] == pytest.approx(
        sk.roc_auc_score(BINARY, VALUES), abs=1e-12
    )


ONE, TWO = VALUES.double(), torch.stack([torch.zeros(ROWS), VALUES], 1).double()
SURE, CHANCES = ONE.sigmoid(), SCORES.double().softmax(1)
MANY = torch.randn(ROWS, CLASSES, generator=GENERATOR).double()
TAGS = (torch.randn(ROWS, CLASSES, generator=GENERATOR) > 0).long()
TAGS[:, 2] = 0  # a label that no row has
RARE = LABELS.clamp(max=1)  # no row has the class 2, though some are taken for it
GAPS = torch.where(torch.arange(ROWS) % 4 == 0, -100, LABELS)
HAS = GAPS >= 0
WORTH = torch.randn(ROWS, 2, generator=GENERATOR).double()
GUESS = (WORTH + torch.randn(ROWS, 2, generator=GENERATOR)).float()
FLAT = torch.ones(ROWS, 2).double()
CHOSEN, DECIDED = SCORES.argmax(1), (ONE > 0).long()
CE, BCE, LOGITS = nn.CrossEntropyLoss(), nn.BCELoss(), nn.BCEWithLogitsLoss()


def ratios(row: str, target: Any, predicted: Any, *averages: str | None) -> dict[str, float]:
    """Precision, recall and F1 by scikit-learn; without an average those of class 1."""
    functions = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}
    return {
        f"{name}_{average}" if average else name: function(
            target, predicted, average=average or row, zero_division=0
        )
        for name, function in functions.items()
        for average in averages
    }


AVERAGED = (None, "macro", "micro", "weighted")
SKLEARN: dict[str, tuple[Any, torch.Tensor, torch.Tensor, Callable[[], dict[str, Any]]]] = {
    "three classes": (
        CE, SCORES, LABELS, lambda:
        ratios("macro", LABELS, CHOSEN, *AVERAGED)
        | {
            "f1_class@0": sk.f1_score(LABELS, CHOSEN, average=None)[0],
            "recall_class@2": sk.recall_score(LABELS, CHOSEN, average=None)[2],
            "log_loss": sk.log_loss(LABELS, CHANCES),
            "confusion_matrix": sk.confusion_matrix(LABELS, CHOSEN).tolist(),
        },
    ),
    "a class without rows": (CE, SCORES, RARE, lambda: ratios("macro", RARE, CHOSEN, *AVERAGED)),
    "labels that are ignored": (
        CE, SCORES, GAPS, lambda:
        ratios("macro", GAPS[HAS], CHOSEN[HAS], *AVERAGED)
        | {
            "accuracy": sk.accuracy_score(GAPS[HAS], CHOSEN[HAS]),
            "log_loss": sk.log_loss(GAPS[HAS], CHANCES[HAS]),
            "confusion_matrix": sk.confusion_matrix(GAPS[HAS], CHOSEN[HAS]).tolist(),
        },
    ),
    "labels side by side": (
        LOGITS, MANY, TAGS, lambda: ratios("macro", TAGS, (MANY > 0).long(), *AVERAGED)
    ),
    **{
        name: (
            loss, output, BINARY, lambda:
            ratios("binary", BINARY, DECIDED, *AVERAGED)
            | {
                "log_loss": sk.log_loss(BINARY, SURE),
                "average_precision": sk.average_precision_score(BINARY, ONE),
                "confusion_matrix": sk.confusion_matrix(BINARY, DECIDED).tolist(),
                "roc_curve": dict(
                    zip(
                        ("false_positive_rate", "true_positive_rate", "threshold"),
                        map(list, sk.roc_curve(BINARY, SURE, drop_intermediate=False)),
                        strict=True,
                    )
                ),
                "precision_recall_curve": dict(
                    zip(
                        ("precision", "recall", "threshold"),
                        map(list, sk.precision_recall_curve(BINARY, SURE)),
                        strict=True,
                    )
                ),
                "calibration_curve": dict(
                    zip(
                        ("true", "predicted"),
                        map(list, calibration.calibration_curve(BINARY, SURE, n_bins=BINS)),
                        strict=True,
                    )
                ),
                "calibration_error": float(tm.CalibrationError("binary", BINS)(SURE, BINARY)),
            },
        )
        for name, loss, output in (
            ("logits", LOGITS, ONE), ("two scores", CE, TWO), ("probabilities", BCE, SURE[:, None])
        )
    },
    "numbers": (
        nn.MSELoss(), GUESS, WORTH, lambda:
        {
            "r2": sk.r2_score(WORTH, GUESS),
            "rmse": sk.root_mean_squared_error(WORTH, GUESS),
            "mape": sk.mean_absolute_percentage_error(WORTH, GUESS),
        },
    ),
    "numbers that are alike": (nn.MSELoss(), GUESS, FLAT, lambda: {"r2": sk.r2_score(FLAT, GUESS)}),
    "numbers without an error": (nn.MSELoss(), FLAT, FLAT, lambda: {"r2": 1.0, "rmse": 0.0}),
}  # fmt: skip


def close(value: Any) -> Any:
    """Numbers within rounding, also in the columns of a curve; a matrix is exact."""
    if isinstance(value, dict):
        return {name: close(part) for name, part in value.items()}
    whole = isinstance(value, list) and isinstance(value[0], list)
    return value if whole else pytest.approx(value, rel=1e-6, abs=1e-9)


@functools.cache
def by_sklearn(row: str) -> dict[str, Any]:
    return SKLEARN[row][-1]()


@pytest.mark.parametrize("row", SKLEARN)
@settings(deadline=None, max_examples=6)
@given(parts=cuts())
def test_values_are_those_of_scikit_learn(row: str, parts: Any) -> None:
    loss, output, target, _ = SKLEARN[row]
    expected = by_sklearn(row)
    scorer = Scorer(None, suited(resolve(list(expected)), loss))
    found = scorer.values(folded(scorer, output, target, parts))
    if "roc_curve" in found:
        assert found["precision_recall_curve"]["threshold"].pop() == math.inf
        assert sum(found["calibration_curve"].pop("count")) == ROWS
    for name, value in found.items():
        assert value == close(expected[name]), name
    assert list(found) == list(expected)


CASES = {
    "sums of classes": (
        lambda: tm.F1Score("multiclass", num_classes=CLASSES, average="macro"), SCORES, LABELS
    ),
    "sums": (lambda: tm.MeanSquaredError(), VALUES, BINARY.float()),
    "several sums": (lambda: tm.R2Score(), VALUES, BINARY.float()),
    "lists": (lambda: tm.AUROC("binary"), VALUES.sigmoid(), BINARY),
    "ranks of lists": (lambda: tm.SpearmanCorrCoef(), VALUES, BINARY.float()),
    "bins": (
        lambda: tm.AUROC("multiclass", num_classes=CLASSES, thresholds=20),
        SCORES.softmax(dim=1), LABELS,
    ),
    "a constant that is a mean": (
        lambda: tm.image.PeakSignalNoiseRatio(data_range=2.0), VALUES, BINARY.float()
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@settings(deadline=None, max_examples=12)
@given(parts=cuts())
def test_torchmetrics_merge(case: tuple[Any, torch.Tensor, torch.Tensor], parts: Any) -> None:
    make, output, target = case
    metric = make()
    metric.update(output, target)
    expected = float(metric.compute())
    scorer = Scorer(None, tuple(resolve([("it", metric)])))
    found = scorer.values(folded(scorer, output, target, parts))
    assert found["it"] == pytest.approx(expected, rel=1e-5)
    assert metric.update_count == 1  # the user's own object is left alone


def test_a_mean_over_updates_is_weighted_by_them() -> None:
    class Mean(tm.Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            self.mean += (output.mean() - self.mean) / self._update_count

        def compute(self) -> torch.Tensor:
            return self.mean

    scorer = Scorer(None, tuple(resolve([Mean()])))
    batches = [(i, i + 10) for i in range(0, ROWS, 10)]
    for parts in ([batches], [batches[:1], batches[1:]], [batches[:4], [], batches[4:]]):
        found = scorer.values(folded(scorer, VALUES, VALUES, parts))
        assert found == pytest.approx({"Mean": float(VALUES.mean())}, abs=1e-6)


def test_states_are_fresh_and_in_order() -> None:
    """A list state keeps the rows' order across partitions, and its own copy of them."""
    (metric,) = resolve([tm.SpearmanCorrCoef()])
    target = VALUES.clone()
    one = metric.update(metric.start(), VALUES[:3], target[:3])
    other = metric.update(metric.start(), VALUES[3:9], target[3:9])
    target.zero_()
    state, updates = metric.merge(one, other)
    assert torch.cat(state["target"]).equal(VALUES[:9])
    assert updates == 2
    assert metric.is_empty(metric.start())


def test_under_inference_mode() -> None:
    scorer = Scorer(None, tuple(resolve([tm.MeanSquaredError(), tm.SpearmanCorrCoef()])))
    states = scorer.start()
    with torch.inference_mode():
        states = scorer.update(states, VALUES * 2, [VALUES])
    states = scorer.update(pickle.loads(pickle.dumps(states)), VALUES * 2, [VALUES])
    found = scorer.values(scorer.merge([states, states]))
    expected = {"MeanSquaredError": float(VALUES.square().mean()), "SpearmanCorrCoef": 1.0}
    assert found == pytest.approx(expected, rel=1e-5)


def test_which_way_is_better() -> None:
    metrics = [tm.MeanSquaredError(), ("f1", tm.F1Score("binary")), tm.SumMetric(), "mae"]
    scorer = Scorer(nn.MSELoss(), tuple(resolve(metrics)))
    assert dict(scorer.higher_is_better) == {
        "loss": False, "MeanSquaredError": False, "f1": True, "SumMetric": True, "mae": False,
    }  # fmt: skip
    assert "loss" not in Scorer(None).higher_is_better


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda: tm.PearsonCorrCoef(), "cannot be merged"),
        (lambda: tm.MaxMetric(), "cannot be merged"),
        (lambda: tm.F1Score("binary") + tm.Accuracy("binary"), "cannot be merged"),
        (lambda: tm.MetricCollection([tm.F1Score("binary")]), "give its metrics one by one"),
    ],
)
def test_torchmetrics_that_cannot_merge(metric: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=f'metric "it" .torchmetrics.*{message}'):
        resolve({"it": metric()})


def test_torchmetrics_of_several_numbers() -> None:
    matrix = tm.ConfusionMatrix("multiclass", num_classes=CLASSES)
    curve = tm.ROC("binary", thresholds=4)
    scorer = Scorer(None, tuple(resolve([("matrix", matrix)])))
    found = scorer.values(folded(scorer, SCORES, LABELS, WHOLE))
    assert found == {"matrix": sk.confusion_matrix(LABELS, CHOSEN).tolist()}
    scorer = Scorer(None, tuple(resolve([("curve", curve)])))
    found = scorer.values(folded(scorer, VALUES.sigmoid(), BINARY, WHOLE))
    assert [len(column) for column in found["curve"]] == [4, 4, 4]
    many = tm.ConfusionMatrix("multiclass", num_classes=300)
    message = message_of(
        ParameterError,
        Scorer(None, tuple(resolve([("m", many)]))).check,
        SCORES.repeat(1, 100),
        [LABELS],
    )
    assert "too many for the history" in message
    message = message_of(
        ParameterError,
        Scorer(None, tuple(resolve(["confusion_matrix"]))).check,
        SCORES.repeat(1, 100),
        [LABELS],
    )
    assert "a confusion matrix of 300 classes is too large to keep" in message


def test_torchmetrics_is_not_imported_for_others() -> None:
    code = (
        "import sys, sparkdl\n"
        "from sparkdl.metrics.scorer import Scorer\n"
        "from sparkdl.metrics.named import resolve\n"
        "resolve(['auc', 'top5', ('mine', sparkdl.MeanMetric('m', max))])\n"
        "print('torchmetrics' in sys.modules)"
    )
    done = run_fresh(code)
    assert done.stdout.strip() == "False", done.stderr


# the loss


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - target) ** 2


LOSSES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "a mean": (lambda output, target: (output[:, 0] - target).abs().mean(), ()),
    "ignores": (nn.CrossEntropyLoss(), ()),
    "ignores positions": (nn.CrossEntropyLoss(), (3,)),
    "weighs classes": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 0.5])), (3,)),
    "of probabilities": (nn.NLLLoss(), ()),
    "a value a sample": (squares, ()),
    "a value a sample of torch": (nn.CrossEntropyLoss(reduction="none"), ()),
}


@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize("row", LOSSES)
def test_any_cut_gives_the_loss_of_one_pass(row: str, size: int) -> None:
    """Also where a batch is ignored altogether."""
    loss, more = LOSSES[row]
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(40, 4, *more, generator=generator)
    target = torch.randint(4, (40, *more), generator=generator)
    if "ignores" in row or "weighs" in row:
        target[:20] = -100
    scorer, batches = Scorer(loss), [(a, min(a + size, 40)) for a in range(0, 40, size)]
    expected = {"loss": pytest.approx(float(loss(output, target).mean()), rel=1e-5)}
    for parts in ([batches], [batches[:1], batches[1:]]):
        assert scorer.values(folded(scorer, output, target, parts)) == expected


def test_weights_of_samples() -> None:
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(1))
    scorer = Scorer(nn.L1Loss(), tuple(resolve(["mae"])))
    states = scorer.start()
    for a, b in ((0, 13), (13, ROWS)):
        states = scorer.update(states, VALUES[a:b], [BINARY[a:b]], weights[a:b])
    error = (VALUES - BINARY).abs()
    expected = {"loss": float((error * weights).sum() / weights.sum()), "mae": float(error.mean())}
    assert scorer.values(states) == pytest.approx(expected, rel=1e-6)


def test_several_labels_and_none() -> None:
    both = Scorer(lambda output, targets: (output - targets[0] - targets[1]).mean())
    states = both.update(both.start(), torch.full((4,), 5.0), [torch.ones(4), torch.ones(4)])
    assert both.values(states) == {"loss": 3.0}
    alone = Scorer(lambda output: output["y"].mean())
    states = alone.update(alone.start(), {"y": torch.ones(4)}, [])
    states = alone.update(states, {"y": torch.zeros(12)}, [])
    assert alone.values(states) == {"loss": 0.25}


def test_nothing_seen() -> None:
    scorer = Scorer(nn.MSELoss(), tuple(resolve(["mae", "auc", tm.MeanSquaredError()])))
    empty = scorer.merge([scorer.start(), scorer.start()])
    assert scorer.is_empty(empty)
    assert scorer.values(empty) == scorer.values(scorer.merge([])) == {}
    states = scorer.update(scorer.start(), VALUES[:0], [VALUES[:0]])
    assert scorer.is_empty(states)


def test_a_metric_that_measured_nothing_is_left_out() -> None:
    masked = MeanMetric("masked", lambda output, target: output[target > 99])
    scorer = Scorer(None, (masked, *resolve(["mae"])))
    assert list(scorer.values(folded(scorer, VALUES, VALUES, WHOLE))) == ["mae"]
    assert math.isnan(masked.value(masked.start()))


# mistakes


@pytest.mark.parametrize(
    ("metric", "output", "labels", "message"),
    [
        (
            "top5",
            SCORES,
            1,
            'metric "top5" failed: top-5 of 3 classes: k is larger than the number of classes. The '
            "output is (60, 3) float32, the label (60,) int64.",
        ),
        (lambda: ("f1", tm.F1Score("binary")), SCORES, 1, "The output is (60, 3) float32"),
        (
            MeanMetric("mine", lambda output, target: {}["key"]),
            SCORES,
            1,
            "failed: KeyError: 'key'",
        ),
        ("mae", SCORES, 2, "one label; the model has 2 (accuracy, mae)"),
        ("mae", (SCORES, SCORES), 1, "a tuple of 0 [60, 3], "),
    ],
)
def test_what_a_metric_cannot_measure(metric: Any, output: Any, labels: int, message: str) -> None:
    metric = metric() if callable(metric) else metric
    scorer = Scorer(None, tuple(resolve(["accuracy", metric])))
    targets = [LABELS] * labels
    assert message in message_of(ParameterError, scorer.update, scorer.start(), output, targets)
    with pytest.raises(ParameterError):
        scorer.check(output, targets)


MISSING = torch.rand(ROWS, CLASSES, generator=GENERATOR) < 0.4


def test_labels_that_are_missing_count_in_no_metric() -> None:
    each, gaps = (SCORES > 0.2).float(), MISSING[:, 1]
    labels = each.masked_fill(MISSING, math.nan)
    tasks = [
        MetricOf("auc", label="y[1]", output=partial(torch.select, dim=1, index=1)),
        MetricOf(("rank", tm.AUROC("binary")), label="y[1]", output=lambda x: x[:, 1].sigmoid()),
    ]
    loss = MaskedLoss(nn.BCEWithLogitsLoss())
    metrics = suited(resolve(["mae", "accuracy", *tasks]), loss)
    scorer = Scorer(loss, metrics, labels=("y",))
    found = scorer.values(folded(scorer, SCORES, labels, [[(0, 7), (7, 8)], [(8, ROWS)]]))
    area = sk.roc_auc_score(each[~gaps, 1], SCORES[~gaps, 1])
    assert found == pytest.approx({
        "loss": float(nn.functional.binary_cross_entropy_with_logits(SCORES[~MISSING], each[~MISSING])),
        "mae": float((SCORES - each)[~MISSING].abs().mean()),
        "accuracy": float(((SCORES > 0) == (each > 0))[~MISSING].float().mean()),
        "y[1]/auc": area,
        "y[1]/rank": area,
    }, rel=1e-5)  # fmt: skip
    numbers, known = LABELS.masked_fill(gaps, -100), ~gaps
    scorer = Scorer(None, tuple(resolve(["mae", "r2"])), labels=("y",), masked=frozenset("y"))
    found = scorer.values(folded(scorer, VALUES, numbers, [[(0, 7), (7, 8)], [(8, ROWS)]]))
    wanted = sk.mean_absolute_error, sk.r2_score
    assert [*found.values()] == pytest.approx([f(LABELS[known], VALUES[known]) for f in wanted])
    words = LABELS.reshape(20, 3).masked_fill(MISSING[:20], -100)
    scorer = Scorer(None, tuple(resolve(["accuracy", "f1"])), labels=("y",), masked=frozenset("y"))
    output = SCORES.reshape(20, 3, 3)
    found = scorer.values(folded(scorer, output, words, [[(0, 7), (7, 8)], [(8, 20)]]))
    chosen, there = output.argmax(1)[~MISSING[:20]], words[~MISSING[:20]]
    f1 = sk.f1_score(there, chosen, average="macro")
    assert [*found.values()] == pytest.approx([sk.accuracy_score(there, chosen), f1])
    for name, text in [("y[3]", "no value 3 in a row"), ("z[0]", '"z[0]" is no label')]:
        wrong = Scorer(None, (MetricOf("mae", label=name, output=None),), labels=("y",))
        assert text in message_of(ParameterError, wrong.update, wrong.start(), SCORES, [labels])
    whole = Scorer(None, tuple(resolve([tm.MeanSquaredError()])))
    text = "labels are missing, and it is no mean over single values"
    assert text in message_of(ParameterError, whole.update, whole.start(), SCORES, [labels])


@pytest.mark.parametrize(
    ("scores", "labels"),
    [
        ([20.0, 40.0, 60.0, 50.0, 45.0, 30.0], [0, 0, 1, 0, 1, 0]),  # 40 and more are certain
        ([-800.0, -900.0, 1.0], [1, 1, 1]),
        ([-800.0, -900.0, 1.0, 50.0], [0, 1, 1, 0]),
        ([36.0, 36.5, 36.7, 37.0, 38.0], [0, 1, 0, 1, 1]),  # neighbours among floats
        ([40.0, 50.0], [0, 0]),
    ],
)
def test_decisions_by_the_best_threshold_are_worth_what_it_says(scores: Any, labels: Any) -> None:
    output, target = torch.tensor(scores), torch.tensor(labels)
    target = torch.cat([target, torch.tensor([0, 1])])
    output = torch.cat([output, output.min()[None] - 1, output.max()[None]])
    scorer = Scorer(None, (best_threshold(),))
    found = scorer.values(folded(scorer, output, target, [[(0, len(output))]]))["best_threshold"]
    decided = output.double().sigmoid() > found["threshold"]
    assert sk.f1_score(target, decided) == pytest.approx(found["value"])


def test_check_lists_every_problem_and_passes_what_works() -> None:
    good = ["accuracy", "top@3", "ndcg", tm.F1Score("multiclass", num_classes=3, average="macro")]
    Scorer(None, tuple(resolve(good))).check(SCORES, [LABELS])
    Scorer(None, tuple(resolve([tm.R2Score(), "auc"]))).check(VALUES[:1], [BINARY[:1]])
    with pytest.raises(ParameterError) as caught:
        Scorer(None, tuple(resolve(["auc", "accuracy", "mae"]))).check(SCORES, [LABELS])
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 problems:"
    assert [line.split()[2] for line in lines[1:]] == ['"auc"', '"mae"']
