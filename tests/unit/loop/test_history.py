"""The history: what was recorded, epoch by epoch, and on disk."""

from __future__ import annotations

import copy
import csv
import json
import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import message_of

from sparkdl.codec.files import parse_tensors
from sparkdl.errors import ParameterError
from sparkdl.loop import history_tables
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState, Validated

ROWS = [  # epoch, loss, samples of the batch, seconds since the start, learning rates
    (1, 4.0, 10, 1.0, (0.5, 0.9)),
    (1, 2.0, 10, 1.5, (0.4, 0.9)),
    (1, 1.0, 5, 1.75, (0.3, 0.9)),
    (2, 0.5, 10, 3.0, (0.2, 0.9)),
    (2, 0.25, 15, 4.0, (0.1, 0.9)),
]


def some_history() -> History:
    history, samples = History(), 0
    for iteration, (epoch, loss, count, seconds, rates) in enumerate(ROWS, start=1):
        samples += count
        state = TrainState(
            iteration=iteration, samples=samples, loss=loss, seconds=seconds, learning_rates=rates
        )
        history.append(state, epoch)
    return history


def test_one_record_an_iteration() -> None:
    history = some_history()
    records = list(history)
    assert (len(history), history.losses) == (5, [4.0, 2.0, 1.0, 0.5, 0.25])
    assert records[0] == {
        "iteration": 1,
        "epoch": 1,
        "loss": 4.0,
        "learning_rate": 0.5,
        "samples": 10,
        "seconds": 1.0,
        "gradient_norm": None,
        "loss_scale": 1.0,
        "skipped": False,
        "bytes_sent": 0,
        "timings": {},
    }
    assert [(r["iteration"], r["epoch"], r["samples"], r["learning_rate"]) for r in records] == [
        *((1, 1, 10, 0.5), (2, 1, 20, 0.4), (3, 1, 25, 0.3), (4, 2, 35, 0.2), (5, 2, 50, 0.1))
    ]


def test_an_epoch_weighs_its_batches_by_their_samples() -> None:
    assert some_history().epochs() == [
        {"epoch": 1, "loss": 2.6, "iterations": 3, "samples": 25, "seconds": 1.75},
        {"epoch": 2, "loss": 0.35, "iterations": 2, "samples": 25, "seconds": 2.25},
    ]


def full_history() -> History:
    """With all that a state may tell: norms, a skipped iteration, timings, validations."""
    history = History()
    norms, skips = [1.5, math.inf, math.nan, None, 0.1], [0, 1, 2, 2, 2]
    for i in range(5):
        timings = {"forward": 0.1 + i, "iteration": 1.0 + 2 * i}
        if i == 3:
            timings["reduce"] = 0.25
        if i == 4:
            del timings["forward"]
        state = TrainState(
            iteration=i + 1,
            samples=10 * (i + 1),
            loss=[0.1 + 0.2, math.inf, math.nan, 1e-300, 5.0][i],
            learning_rates=(1 / 3,),
            seconds=0.1 * (i + 1),
            gradient_norm=norms[i],
            loss_scale=2.0**16 / (1 + skips[i]),
            skipped=skips[i],
            timings=timings,
        )
        history.append(state, 1 + i // 2)
        if i in (1, 3):
            metrics = {"accuracy": 0.1 * i} | ({"f1": math.nan} if i == 3 else {})
            history.append_validation(
                Validated(iteration=i + 1, epoch=(i + 1) // 2, metrics=metrics)
            )
    history.stopped, history.ended_by = "interrupted", "MaxEpoch(epochs=3)"
    return history


def same(a: Any, b: Any) -> bool:
    """Equal, and NaN only where the other is: as the shortest exact texts."""
    return repr(a) == repr(b)


def test_times_of_an_activity_are_those_of_the_iterations_that_measured_it() -> None:
    found = full_history().timings()
    assert list(found) == ["forward", "reduce", "iteration"]
    assert found["iteration"] == {"mean": 5.0, "median": 5.0, "share": 1.0}
    assert found["forward"]["share"] == pytest.approx(6.4 / (1 + 3 + 5 + 7))
    assert found["reduce"] == pytest.approx({"mean": 0.25, "median": 0.25, "share": 0.25 / 7})


def test_what_was_not_measured_is_unknown() -> None:
    """Shares of an iteration, and the learning rate of an optimizer that has none."""
    history = History()
    history.append(TrainState(iteration=1, samples=1, loss=1.0, timings={"fetch": 2.0}), 1)
    assert math.isnan(next(iter(history))["learning_rate"])
    assert history.timings()["fetch"]["mean"] == 2.0
    assert math.isnan(history.timings()["fetch"]["share"])
    assert history.timing_table().splitlines()[1] == "fetch      2,000.0     2,000.0"


def test_the_table_of_timings() -> None:
    history = History()
    for i, scale in enumerate((1.0, 3.0, 8.0), start=1):
        timings = {"iteration": 0.04 * scale, "forward": 0.01 * scale, "schedule": 0.002 * scale}
        history.append(TrainState(iteration=i, samples=i, loss=1.0, timings=timings), 1)
    assert history.timing_table().splitlines() == [
        "activity    mean ms   median ms   share",
        "schedule        8.0         6.0      5%",
        "forward        40.0        30.0     25%",
        "iteration     160.0       120.0    100%",
    ]
    assert History().timing_table() == "no timings were recorded"


def test_a_notebook_shows_the_loss_and_the_last_metrics() -> None:
    history = some_history()
    history.append_validation(Validated(iteration=5, epoch=2, metrics={"a<b": 0.125}))
    shown = history._repr_html_()
    assert shown.startswith("<table><tr>")
    for text in ("iterations", ">5<", "0.25", "0.35", "a&lt;b (iteration 5)", "0.125"):
        assert text in shown
    assert ">0<" in History()._repr_html_()


def test_the_curves_are_in_the_page() -> None:
    """As SVG that any reader of XML takes, with a line for each kind of loss, and no address."""
    history = some_history()
    for iteration, loss in ((3, 0.5), (5, math.nan)):
        metrics = {"loss": loss, "accuracy<": 0.5}
        history.append_validation(Validated(iteration=iteration, epoch=1, metrics=metrics))
    shown = history._repr_html_()
    pictures = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", shown)]
    assert [len(picture.findall("{*}polyline")) for picture in pictures] == [3, 1]
    assert [text.text for text in pictures[1].findall("{*}text")].count("accuracy<") == 1
    assert set(re.findall(r"https?://[^'\"]+", shown)) == {"http://www.w3.org/2000/svg"}
    points = pictures[0].findall("{*}polyline")[0].get("points")
    assert len(points.split()) == 5
    assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", shown))


def test_a_long_history_is_drawn_with_few_points() -> None:
    history = History()
    for i in range(1, 5001):
        history.append(TrainState(iteration=i, loss=1 / i, samples=i, seconds=float(i)), 1)
    (text, _) = re.findall(r"points='([^']+)'", history._repr_html_())
    assert 300 <= len(text.split()) <= 401


def test_it_prints_itself_in_one_line() -> None:
    history = some_history()
    line = "5 iterations up to epoch 2, last loss 0.25"
    assert repr(history) == f"<sparkdl.History: {line}>"
    history.ended_by = "MaxEpoch(epochs=2)"
    assert repr(history) == f"<sparkdl.History: {line}, ended by: MaxEpoch(epochs=2)>"
    history.stopped = "interrupted"
    assert repr(history).endswith(", last loss 0.25, stopped: interrupted>")
    assert history.branch().stopped is None
    assert repr(History()) == "<sparkdl.History: no iterations>"


def test_back_to_an_iteration() -> None:
    history = full_history()
    history.truncate(3)
    assert [r["iteration"] for r in history] == [1, 2, 3]
    assert [v["iteration"] for v in history.validations] == [2]
    state = TrainState(iteration=4, samples=40, loss=0.5, skipped=3, timings={"data": 1.0})
    history.append(state, 2)
    last = list(history)[-1]
    assert (last["iteration"], last["skipped"], last["timings"]) == (4, True, {"data": 1.0})
    history.truncate(0)
    assert (len(history), history.validations) == (0, [])


def test_of_a_run_that_goes_on() -> None:
    """Its first iteration is told from what came before."""
    before = Validated(iteration=4, epoch=1, metrics={"loss": 1.0})
    state = TrainState(iteration=4, samples=100, seconds=9.0, skipped=2, validations=(before,))
    history = History.after(state)
    history.append(TrainState(iteration=5, samples=110, seconds=9.5, loss=2.0, skipped=2), 2)
    (record,) = history
    assert (record["iteration"], record["skipped"]) == (5, False)
    assert history.validations == [{"iteration": 4, "epoch": 1, "metrics": {"loss": 1.0}}]
    epoch = {"epoch": 2, "loss": 2.0, "iterations": 1, "samples": 10, "seconds": 0.5}
    assert history.epochs() == [epoch]
    assert History.from_json_bytes(history.to_json_bytes()).epochs() == [epoch]


@pytest.mark.parametrize("history", [History(), some_history(), full_history()])
def test_the_file_is_json_for_anyone_and_brings_everything_back(
    tmp_path: Path, history: History
) -> None:
    path = tmp_path / "history.json"
    history.save(path)
    assert path.read_text().endswith("}\n")
    content = json.loads(path.read_text())
    rows = list(history)
    timings = [row.pop("timings") for row in rows]
    names = dict.fromkeys(name for row in timings for name in row)
    expected = {
        "iterations": rows,
        "epochs": history.epochs(),
        "validations": history.validations,
        "timings": {name: [row.get(name) for row in timings] for name in names},
        "start": {"samples": 0, "seconds": 0.0, "skipped": 0},
        "stopped": history.stopped,
        "ended_by": history.ended_by,
    }
    assert same(content, expected)
    for loaded in (History.load(str(path)), History.from_bytes(history.to_bytes())):
        assert loaded.to_json_bytes() == history.to_json_bytes()
        assert same(loaded.timings(), history.timings())


FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.lists(
        st.tuples(
            FLOATS,
            st.none() | st.floats(min_value=0) | st.just(math.nan),
            st.booleans(),
            st.dictionaries(st.sampled_from(["data", "update"]), st.floats(0, 9)),
            st.dictionaries(st.text(max_size=5), FLOATS, max_size=2),
        ),
        max_size=6,
    )
)
def test_any_history_comes_back_from_any_format(rows: list[Any]) -> None:
    history, skipped = History(), 0
    for i, (loss, norm, skip, timings, metrics) in enumerate(rows, start=1):
        skipped += skip
        state = TrainState(
            iteration=i, samples=i, loss=loss, gradient_norm=norm, skipped=skipped, timings=timings
        )
        history.append(state, i)
        if metrics:
            arrays = {"matrix": [[1, 2], [3, i]]} if i % 2 else {}
            record = Validated(iteration=i, epoch=i, metrics=metrics, arrays=arrays)
            history.append_validation(record)
    for back in (
        History.from_json_bytes(history.to_json_bytes()),
        History.from_bytes(history.to_bytes()),
        History.from_bytes(history.branch().to_bytes()),
    ):
        assert back.to_json_bytes() == history.to_json_bytes()
    loaded = History._of(history_tables.from_csv(history_tables.to_csv(history._flat())))
    assert same(list(loaded), list(history))
    assert same(loaded.epochs(), history.epochs())
    for mine, its in zip(loaded.validations, history.validations, strict=True):
        assert same(sorted(mine["metrics"].items()), sorted(its["metrics"].items()))


def test_a_file_of_an_older_version(tmp_path: Path) -> None:
    keys = ("iteration", "epoch", "loss", "learning_rate", "samples", "seconds")
    rows = [{key: row[key] for key in keys} for row in some_history()]
    (tmp_path / "history.json").write_text(json.dumps({"iterations": rows, "epochs": []}))
    loaded = History.load(tmp_path / "history.json")
    assert list(loaded) == list(some_history())
    assert loaded.validations == []


def test_csv_has_a_row_an_iteration(tmp_path: Path) -> None:
    full_history().save(tmp_path / "history.CSV")
    with (tmp_path / "history.CSV").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert list(rows[0])[:3] == ["iteration", "epoch", "loss"]
    assert list(rows[0])[-2:] == ["validation/accuracy", "validation/f1"]
    assert [row["validation/accuracy"] for row in rows] == ["", "0.1", "", str(0.1 * 3), ""]
    assert [row["gradient_norm"] for row in rows] == ["1.5", "inf", "nan", "", "0.1"]
    assert [row["timings/forward"] for row in rows] == ["0.1", "1.1", "2.1", "3.1", ""]
    assert [row["skipped"] for row in rows] == ["False", "True", "True", "False", "False"]


def test_a_table_of_pandas_has_the_columns_of_the_csv(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    history = full_history()
    for i in (6, 7):
        named = {"kind": 0.5 + i}
        state = TrainState(iteration=i, loss=1.0, losses=named, decisions={"staleness": i})
        history.append(state, 3)
    history.save(tmp_path / "history.csv")
    table, frame = history.to_pandas(), pandas.read_csv(tmp_path / "history.csv")
    assert set(table.columns) == set(frame.columns)
    assert table["losses/kind"].tolist()[-2:] == [6.5, 7.5]
    assert table["losses/kind"].count() == 2
    assert table["staleness"].tolist() == frame["staleness"].tolist()
    assert table["staleness"].tolist()[-2:] == [6, 7]
    assert frame["loss"][3] == 1e-300
    History().save(tmp_path / "history.csv")
    assert pandas.read_csv(tmp_path / "history.csv").empty


@pytest.mark.parametrize(
    "content",
    ['{"iterations": [{"it', "[]", '{"iterations": [{"iteration": 1}]}', "iteration,epoch\n1,"],
)
def test_a_file_that_holds_no_history_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / ("a.csv" if content.startswith("iteration") else "a.json")
    path.write_text(content)
    assert message_of(ParameterError, History.load, path).startswith(f"{path} is not a history")


@pytest.mark.parametrize("name", ["history.xlsx", "history"])
def test_another_suffix(tmp_path: Path, name: str) -> None:
    for act in (History().save, History.load):
        assert message_of(ParameterError, act, tmp_path / name) == (
            f'history file "{tmp_path / name}": end its name in .json or .csv.'
        )


def test_an_iteration_takes_a_few_bytes() -> None:
    history, names = History(), "schedule data fetch forward backward publish reduce update"
    timings = dict.fromkeys([*names.split(), "iteration"], 0.1)
    for iteration in range(1000):
        state = TrainState(iteration=iteration, samples=iteration, loss=0.1, timings=timings)
        history.append(state, 1)
    columns = history._table.values()
    assert sum(len(column) * column.itemsize for column in columns) == 1000 * 152


def test_an_epochs_mean_is_over_what_has_a_loss() -> None:
    """An iteration that was skipped, or whose samples all have no weight, counts in no mean."""
    history = History()
    for i, (epoch, loss) in enumerate([(1, 4.0), (1, math.nan), (1, 2.0), (2, math.inf)], start=1):
        history.append(TrainState(iteration=i, samples=10 * i, loss=loss), epoch)
    first, second = history.epochs()
    assert (first["loss"], first["samples"], first["iterations"]) == (3.0, 30, 3)
    assert math.isnan(second["loss"])


# A common beginning


@given(
    st.lists(
        st.tuples(
            st.sampled_from("append validate branch truncate skips".split()), st.integers(0, 9)
        ),
        max_size=40,
    )
)
@settings(max_examples=50)
def test_histories_that_go_on_from_one_leave_each_other_alone(steps: list[tuple[str, int]]) -> None:
    """Each is what a copy is to which the same is done."""
    shared, alone = [History()], [History()]
    for what, number in steps:
        i = number % len(shared)
        pair = (shared[i], alone[i])
        last = len(pair[0])
        state = TrainState(
            iteration=last + 1, samples=10 * last, loss=number, timings={f"t{number % 3}": 1.0}
        )
        if what == "branch":
            shared.append(shared[i].branch())
            alone.append(copy.deepcopy(alone[i]))
        for history in () if what == "branch" else pair:
            if what == "append":
                history.append(state, 1 + number)
            elif what == "validate":
                metrics = {"a": float(number)}
                history.append_validation(Validated(iteration=last, epoch=1, metrics=metrics))
            elif what == "truncate":
                history.truncate(number)
            else:
                history.follow(TrainState(skipped=number))
        for one, other in zip(shared, alone, strict=True):
            assert one.to_json_bytes() == other.to_json_bytes()
            assert (len(one), one.losses) == (len(other), other.losses)


def long_history(count: int) -> History:
    history = History()
    for i in range(count):
        state = TrainState(iteration=i + 1, samples=8 * (i + 1), loss=1.0, seconds=0.5 * i)
        history.append(state, 1 + i // 10)
    return history


def test_going_on_costs_nothing_however_long_it_is() -> None:
    history = long_history(20_000)
    tracemalloc.start()
    try:
        for _ in range(100):
            history = history.branch()
            history.append(TrainState(iteration=len(history) + 1, loss=1.0), 1)
        assert tracemalloc.get_traced_memory()[1] < 500_000  # a copy has 1.6 MB
    finally:
        tracemalloc.stop()
    assert len(history) == 20_100


def test_the_end_of_a_history() -> None:
    history = full_history()
    assert history.tail(9) is history
    end = history.tail(2)
    assert list(end) == list(history)[3:]
    assert [v["iteration"] for v in end.validations] == [4]
    assert end.epochs()[-1] == history.epochs()[-1]
    assert end.timings()["reduce"] == history.timings()["reduce"]
    assert len(long_history(500).tail(50).to_json_bytes()) < 15_000


def test_a_checkpoint_holds_8_bytes_a_number() -> None:
    """Only the iterations of this history count."""
    history = long_history(5_000)
    other = history.branch()
    other.append(TrainState(iteration=5_001, timings={"data": 1.0}), 1)
    figures = len(next(iter(history))) - 1  # "timings", of which there are none
    assert 0 < len(history.to_bytes()) - 8 * figures * 5_000 < 2_000
    assert 0 < len(other.to_bytes()) - 8 * (figures + 1) * 5_001 < 2_000


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("loss"),
        lambda tensors: tensors.update(loss=tensors["loss"][:2]),
        lambda tensors: tensors.update(loss=tensors["loss"].float()),
        lambda tensors: tensors.update(loss=tensors["loss"][:, None]),
        lambda tensors: tensors.update(more=tensors["iteration"]),
    ],
)
def test_bytes_that_are_no_history(change: Callable[[dict[str, Any]], Any]) -> None:
    tensors, metadata = parse_tensors(some_history().to_bytes())
    change(tensors)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(ParameterError, match=r"^it is not a history"):
        History.from_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(ParameterError, match=r"^it is not a history"):
        History.from_bytes(b"{}")
