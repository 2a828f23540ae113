"""Pages about runs and searches: what is on them, that no text becomes markup, and their size."""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mistakes import message_of

import sparkdl
from sparkdl import reports
from sparkdl.loop.history import History
from sparkdl.loop.report import run_page
from sparkdl.loop.state import TrainState, Validated
from sparkdl.tune.folder import Objective, TrialRecord
from sparkdl.tune.result import search_page

EVIL = "</script><script>document.title='taken'</script>&\"'@y $x $$a$$"
MOST_BYTES = 2_000_000
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def a_history(count: int, named: int = 0, rate: float = 0.1) -> History:
    history = History()
    for i in range(1, count + 1):
        loss = 1 / i + 0.1 * math.sin(i)
        state = TrainState(
            iteration=i,
            samples=32 * i,
            seconds=0.01 * i,
            loss=loss,
            learning_rates=(rate,),
            losses={f"{EVIL}{n} key=hunter2": loss * n for n in range(named)},
            timings={"forward": 0.002, "backward": 0.004, "iteration": 0.01},
            decisions={"staleness": i % 2} if named else {},
        )
        history.append(state, 1 + (i - 1) * 2 // count)
        if i % (count // 2 or 1) == 0:
            metrics = {"loss": loss, "accuracy": 0.5, **({EVIL: 0.25} if named else {})}
            arrays = {"confusion": [[3, 1], [0, 4]], EVIL: {"$$x$$ <": [0, 1], "y": [0.5, 1]}}
            arrays |= {"odd": [[1], [1, 2]], "none": []}
            history.append_validation(
                Validated(iteration=i, epoch=1, metrics=metrics, arrays=arrays if named else {})
            )
    history.note_facts(
        {
            "Training": [["model", "Net of 5 parameters"], ["notes", f"{EVIL} token=hunter2"]],
            "Arguments": [["optimizer", f"SGD(lr={rate})"], ["seed", "3"]],
            "Columns": [["column", "role", "values"], [EVIL, "feature", "float32[3]"]],
            "Environment": [["Python", "3.11"]],
        }
    )
    history.note_event("recovery", count // 2, 1.25, "a slice was lost with an executor")
    history.note_event("checkpoint", count, 0.5, "s3://me:hunter2@bucket/runs/1")
    return history


class Seen(HTMLParser):
    """The tags of a page, and its text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_data(self, data: str) -> None:
        if self.tags[-1] not in ("script", "style"):
            self.text += data + "\n"


def test_a_page_says_what_was_trained_and_how_it_went(tmp_path: Path) -> None:
    history = a_history(10, named=1)
    history.stopped, history.ended_by = "interrupted", None
    page = history.report(tmp_path / "report.html", f"run {EVIL}").read_text()
    seen = Seen(page)
    assert seen.tags.count("script") == 3  # Bokeh, its data, and what shows them
    assert seen.addresses == []
    assert "hunter2" not in page
    for text in (
        "10 iterations up to epoch 2",
        "The run was interrupted",
        "a slice was lost with an executor",
        "1 (1.2 s)",
        "Net of 5 parameters",
        "SGD(lr=0.1)",
        "float32[3]",
        "decisions of the consistency model",
        "sparkdl.load('s3://(redacted)@bucket/runs/1')",
        "milliseconds of an iteration",
    ):
        assert text in seen.text, text
    assert re.findall(r"196/(\d\.\d+)\)", page) == ["0.75", "0.25", "0.00", "1.00"]  # the matrix
    assert seen.text.count(EVIL) >= 4  # title, heading, card, key, cells
    again = History.from_json_bytes(history.to_json_bytes())
    assert (again.facts, again.events) == (history.facts, history.events)
    again = History.from_bytes(history.to_bytes())
    assert (again.facts, again.events) == (history.facts, history.events)


@pytest.mark.parametrize(("count", "named"), [(100_000, 0), (2_000, 60)])
def test_a_page_stays_small(count: int, named: int) -> None:
    page = run_page(a_history(count, named), "long").html()
    assert len(page.encode()) < MOST_BYTES


@pytest.mark.parametrize("losses", [[], [1.0], [math.nan] * 3, [math.inf, 1.0, 0.0]])
@pytest.mark.filterwarnings("error")
def test_any_history_has_a_page(losses: list[float]) -> None:
    history = History()
    for i, loss in enumerate(losses, start=1):
        history.append(TrainState(iteration=i, samples=i, loss=loss), i)
    wrong = sum(not math.isfinite(loss) for loss in losses)
    text = Seen(run_page(history, "any").html()).text
    assert ("is not finite" in text) == bool(wrong)
    assert 'trained.save("model")' in text


def test_runs_beside_each_other(tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("a", "b")}
    for rate, (name, folder) in zip((0.1, 0.2), runs.items(), strict=True):
        (folder / "model").mkdir(parents=True)
        saved = folder / ("history.json" if name == "a" else "model/history.json")
        a_history(20, rate=rate).save(saved)
    found = sparkdl.compare([*runs.values(), a_history(40)], tmp_path / "all.html")
    assert list(found.histories) == [str(runs["a"]), str(runs["b"]), "run 3"]
    rows = {name: cells for name, *cells in found.rows()}
    assert rows["iterations"] == ["20", "20", "40"]
    assert rows["optimizer"] == ["SGD(lr=0.1)", "SGD(lr=0.2)", "SGD(lr=0.1)"]
    assert "seed" not in rows  # it does not differ
    assert found._repr_html_().count("<svg") == 5
    seen = Seen((tmp_path / "all.html").read_text())
    assert seen.text.count("run 3") == 6  # the table, and each chart
    assert reports.report_of(runs["b"]).name == "report.html"
    assert message_of(sparkdl.ParameterError, sparkdl.compare, [tmp_path / "model"]) == (
        f"{tmp_path}/model has no history: give a run folder, a saved model, a checkpoint, or a file "
        "of history.save."
    )
    assert message_of(sparkdl.ParameterError, sparkdl.compare, str(tmp_path)).startswith(
        "compare: "
    )


def a_search() -> str:
    records = [
        TrialRecord(
            number=n,
            arguments={"optimizer.lr": 10.0 ** (-n / 10), "loss": "pwd=hunter2" if n % 2 else EVIL},
            status="failed" if n == 3 else "completed",
            value=math.nan if n == 3 else 0.1 * n,
            reason=f"{EVIL} password=hunter2" if n == 3 else "",
        )
        for n in range(24)
    ]
    return search_page(records, Objective("accuracy", higher=True, best=True), "search").html()


def test_a_search_says_what_mattered() -> None:
    page = a_search()
    seen = Seen(page)
    assert seen.tags.count("script") == 3
    assert "hunter2" not in page
    assert "accuracy of trial 23, the best" in seen.text
    rows = [html.unescape(text) for text in re.findall(r"<td[^>]*>([^<]*)</td>", page)]
    assert (rows[rows.index("optimizer.lr") + 1], rows[rows.index("loss") + 1]) == ("92%", "0%")


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("kind", ["run", "search"])
def test_a_browser_draws_it_and_runs_nothing_else(tmp_path: Path, kind: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(a_search() if kind == "search" else run_page(a_history(50, 2), "run").html())
    told = subprocess.run(
        [
            *(
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--virtual-time-budget=5000",
                "--dump-dom",
            ),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()),
        ],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    assert f"<title>{kind}</title>" in told.stdout
    assert told.stdout.count("bk-Figure") == told.stdout.count("<figure")
    assert "Uncaught" not in told.stderr
