"""Sessions, what a fit shows while it runs, and what it leaves when it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import fork_server
import pytest
import torch
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl.session import SessionFacts, settings_of, tell_what_costs_speed
from sparkdl.settings import NEEDED_FOR_SPEED, SPARK_SETTINGS, Settings
from sparkdl.spark import executors

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))


def trainer(**changes: Any) -> sparkdl.Trainer:
    values: dict[str, Any] = {
        "model": make_model,
        "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.01),
        "batch_size": 4,
        "replicas": 2,
        "stop": sparkdl.max_iteration(3),
        **changes,
    }
    return sparkdl.Trainer(**values)


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    rows = [([float(i), 1.0], float(i)) for i in range(8)]
    return spark.createDataFrame(rows, "features array<double>, label double")


PROGRAM = """
import json, logging, os, sys, time
from functools import partial
import sparkdl, torch
from pyspark.sql import SparkSession
from torch import nn

QUIET = {"spark.ui.enabled": "false", "spark.driver.bindAddress": "127.0.0.1",
         "spark.driver.host": "127.0.0.1"}

def table(spark):
    rows = [([float(i), 1.0], float(i)) for i in range(8)]
    return spark.createDataFrame(rows, "features array<double>, label double")

def trainer(**changes):
    return sparkdl.Trainer(**{
        "model": lambda: nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.01), "batch_size": 4, "replicas": 2,
        "stop": sparkdl.max_iteration(3), **changes})

def say(**values):
    print(json.dumps(values), flush=True)
"""


def program(body: str, folder: Path) -> list[Any]:
    path = folder / "program.py"
    path.write_text(PROGRAM + body)
    return [fork_server.start(), str(path)]


def run(body: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Run a script of its own; the JSON lines it says, and its stderr."""
    result = subprocess.run(
        program(body, folder), cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()], result.stderr


# Sessions


def test_a_session_has_the_settings(spark: Any) -> None:
    conf = spark.sparkContext.getConf()
    assert {key: conf.get(key) for key in SPARK_SETTINGS} == {
        key: value for key, (value, _) in SPARK_SETTINGS.items()
    }
    assert tell_what_costs_speed(spark.sparkContext) == []


def test_workers_are_forked_with_torch_in_them(spark: Any) -> None:
    def look(_: int) -> tuple[bool, bool]:
        import gc
        import sys

        return "torch" in sys.modules, gc.get_freeze_count() > 100_000

    assert spark.sparkContext.parallelize([0], 1).map(look).collect() == [(True, True)]


def test_an_executor_has_one_daemon(spark: Any) -> None:
    """SQL's Python tasks and others are forked from the same one, so that torch is imported once."""

    def parent(_: Any) -> int:
        import os

        return os.getppid()

    rdd = spark.sparkContext.parallelize([0], 1)
    tables = spark.range(1, numPartitions=1).mapInPandas(
        lambda frames: (frame.assign(id=parent(frame)) for frame in frames), "id long"
    )
    assert rdd.map(parent).collect() == [row.id for row in tables.collect()]


@pytest.mark.soak
def test_a_plain_session_trains_and_the_users_settings_win(table: Any, tmp_path: Path) -> None:
    """A plain session is told what costs speed."""
    said, stderr = run(
        """
logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
builder = SparkSession.builder.master("local[1]")
for key, value in QUIET.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
data = table(spark)
conf = spark.sparkContext.getConf()
say(losses=trainer(replicas=1).fit(data).history.losses,
    missing=[k for k in NEEDED if conf.get(k, "") != NEEDED[k]])
spark.stop()
print("stopped", file=sys.stderr, flush=True)

# as spark-submit does for --conf
spark._jvm.System.setProperty("spark.python.daemon.module", "rapids.daemon")
spark = sparkdl.session("local[1]", spark_shuffle_compress=True, spark_app_name="mine",
                        **{**QUIET, "spark.log.level": "FATAL", "spark.sql.shuffle.partitions": 3})
conf = spark.sparkContext.getConf()
say(**{key: conf.get(key) for key in (
    "spark.master", "spark.shuffle.compress", "spark.app.name", "spark.sql.shuffle.partitions",
    "spark.ui.showConsoleProgress", "spark.python.unix.domain.socket.enabled",
    "spark.python.daemon.module")})
from sparkdl.session import tell_what_costs_speed
tell_what_costs_speed(spark.sparkContext)
say(level=str(spark._jvm.org.apache.logging.log4j.LogManager.getRootLogger().getLevel()),
    again=sparkdl.session().sparkContext is spark.sparkContext)
kept = {"spark.executor.memory": "2g", "spark.sql.shuffle.partitions": 4, "spark.sparkdl.stages": "one"}
sparkdl.session("local[1]", **QUIET)
sparkdl.session("local[2]", **QUIET, **kept)
""".replace("NEEDED", repr({key: SPARK_SETTINGS[key][0] for key in NEEDED_FOR_SPEED})),
        tmp_path,
    )
    expected = trainer(replicas=1).fit(table).history.losses
    assert said[0]["losses"] == expected  # the same bits
    plain, _, stderr = stderr.partition("stopped\n")
    told = [line for line in plain.splitlines() if line.startswith("sparkdl WARNING")]
    assert told == [
        f"sparkdl WARNING slower than necessary: set {key}={value} ({reason})"
        for key, (value, reason) in SPARK_SETTINGS.items()
        if key in said[0]["missing"]
    ]
    assert said[1] == {
        "spark.master": "local[1]",
        "spark.shuffle.compress": "true",
        "spark.app.name": "mine",
        "spark.sql.shuffle.partitions": "3",
        "spark.ui.showConsoleProgress": "false",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.daemon.module": "rapids.daemon",
    }
    other = (
        "sparkdl WARNING slower than necessary: spark.python.daemon.module=rapids.daemon is another"
    )
    assert other in stderr
    assert said[2] == {"level": "FATAL", "again": True}
    kept = [line for line in stderr.splitlines() if "is already running" in line]
    assert kept == [
        "sparkdl WARNING a session with spark.master=local[1] is already running and is kept. Without "
        "effect: spark.master=local[2], spark.executor.memory. To get another session, stop that one "
        "first, with spark.stop()."
    ]


# What a fit shows


class Watch(sparkdl.Callback):
    """Notes the job group, and can go wrong."""

    def __init__(self, context: Any, fail_at: int | None = None) -> None:
        self.context, self.fail_at = context, fail_at
        self.group, self.iterations = "", 0

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        self.group = self.context.getLocalProperty("spark.jobGroup.id")
        self.iterations = state.iteration
        if state.iteration == self.fail_at:
            raise LookupError("a callback's own mistake")


def jobs_of(context: Any, group: str) -> dict[str, list[str]]:
    """Description of each job of a group, in order -> the names of its stages."""
    context._jsc.sc().listenerBus().waitUntilEmpty()
    tracker, store = context.statusTracker(), context._jsc.sc().statusStore()
    jobs: dict[str, list[str]] = {}
    for job in sorted(tracker.getJobIdsForGroup(group)):
        stages = [tracker.getStageInfo(i) for i in sorted(tracker.getJobInfo(job).stageIds)]
        description = store.job(job).description().get()
        jobs.setdefault(description, []).extend(stage.name for stage in stages if stage)
    return jobs


def test_jobs_and_stages_have_names(spark: Any, table: Any) -> None:
    watch = Watch(spark.sparkContext)
    result = trainer(callbacks=[watch]).fit(table)
    jobs = jobs_of(spark.sparkContext, watch.group)
    two = ["forward-backward", "parameter synchronization"]
    first, second, _ = (f"{loss:.4g}" for loss in result.history.losses)
    assert jobs["sparkdl: epoch 1 · iteration 1"] == two
    assert jobs[f"sparkdl: epoch 1 · iteration 2 · loss {first}"] == two
    assert jobs[f"sparkdl: epoch 2 · iteration 3 · loss {second}"][:2] == two
    assert "remove the slabs" in jobs["sparkdl: removing the slabs"]
    names = [name for stages in jobs.values() for name in stages]
    for name in ("write samples into slabs", "set up replicas", "write the initial state"):
        assert name in names
    assert all(description.startswith("sparkdl: ") for description in jobs)


def test_the_callers_job_group_is_restored(spark: Any, table: Any) -> None:
    context = spark.sparkContext
    context.setJobGroup("mine", "my own jobs", True)
    keys = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    before = [context.getLocalProperty(key) for key in keys]
    assert before == ["mine", "my own jobs", "true"]
    try:
        trainer().fit(table)
        assert [context.getLocalProperty(key) for key in keys] == before
        with pytest.raises(LookupError):
            trainer(callbacks=[Watch(context, fail_at=1)]).fit(table)
        assert [context.getLocalProperty(key) for key in keys] == before
        with pytest.raises(sparkdl.DataError):
            trainer(label="none").fit(table)
        assert [context.getLocalProperty(key) for key in keys] == before
    finally:
        for key in (*keys, "callSite.short"):
            context.setLocalProperty(key, None)


@pytest.mark.parametrize(("mode", "shown"), [("true", True), ("false", False), ("auto", False)])
def test_the_progress_bar(
    table: Any,
    mode: str,
    shown: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SessionFacts, "settings", Settings(progress=mode))
    losses = trainer(engine="local").fit(table).history.losses
    captured = capsys.readouterr()
    assert captured.out == ""
    if shown:
        last = captured.err.replace("\n", "\r").strip("\r ").split("\r")[-1]
        assert last.startswith("epoch 2: 100%")
        assert "3/3" in last
        assert f"loss {losses[-1]:.4g}, " in last
        assert "samples/s" in last
    else:
        assert captured.err == ""


def test_the_sessions_own_settings_are_read(spark: Any) -> None:
    assert settings_of(spark.sparkContext) == Settings(progress="false")
    session = spark.newSession()
    session.conf.set("spark.sparkdl.slab.dir", "/mnt/nvme")  # while it runs
    found = settings_of(spark.sparkContext, session)
    assert found == Settings(progress="false", slab_dir="/mnt/nvme")


# Stopping


def test_a_callbacks_mistake_ends_the_fit_cleanly(
    spark: Any, table: Any, nothing_left: Any, slabs: Any
) -> None:
    watch = Watch(spark.sparkContext, fail_at=2)
    with pytest.raises(LookupError, match="a callback's own mistake"):
        trainer(callbacks=[watch], stop=sparkdl.max_iteration(100)).fit(table)
    assert watch.iterations == 2
    nothing_left()
    assert slabs(local=True) == []
    assert len(trainer().fit(table).history) == 3


def test_a_failing_task_ends_the_fit_cleanly(table: Any, nothing_left: Any, slabs: Any) -> None:
    with pytest.raises(sparkdl.TrainingError) as caught:
        trainer(model=FailsLate, stop=sparkdl.max_iteration(100)).fit(table)
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith("iteration 1, epoch 1: partition ")
    assert first_line.endswith(" failed once. ArithmeticError: only in tasks")
    nothing_left()
    assert slabs(local=True) == []


class FailsLate(nn.Linear):
    """Works on the driver, fails in a task."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from pyspark import TaskContext

        if TaskContext.get() is not None:
            raise ArithmeticError("only in tasks")
        return super().forward(x)[:, 0]


@pytest.mark.slow
def test_ctrl_c_and_a_jvm_that_is_killed(tmp_path: Path) -> None:
    """SIGINT ends the fit within seconds, the first with its model, the second without; nothing of it
    stays in the session. Where the JVM is killed after the last iteration, the weights come back."""
    body = """
import glob, signal

class Kill(sparkdl.Callback):
    def __init__(self, pid):
        self.pid = pid

    def on_fit_end(self, trainer, state):
        os.kill(self.pid, signal.SIGKILL)

class Tell(sparkdl.Callback):
    def __init__(self, sleep):
        self.sleep = sleep

    def on_iteration_end(self, trainer, state):
        if state.iteration == 2:
            say(training=True)
            time.sleep(self.sleep)

class Slow(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

    def forward(self, x):
        time.sleep(0.2)
        return super().forward(x)[:, 0]

spark = sparkdl.session("local[2]", **QUIET)
context = spark.sparkContext
for sleep in (0, 60):  # in a job; twice, between jobs
    how = "at once"
    try:
        stop = sparkdl.max_iteration(100_000)
        fitted = trainer(model=Slow, callbacks=[Tell(sleep)], stop=stop).fit(table(spark))
        how = fitted.history.stopped
    except KeyboardInterrupt:
        pass
    finally:
        stopped = time.time()
        context._jsc.sc().listenerBus().waitUntilEmpty()
        say(how=how, stopped=stopped, slabs=glob.glob(f"/dev/shm/sparkdl-{context.applicationId}-*"),
            local=glob.glob(f"/tmp/blockmgr-*/sparkdl-{context.applicationId}-*"),
            persisted=context._jsc.getPersistentRDDs().size(),
            active=list(context.statusTracker().getActiveJobsIds()),
            group=context.getLocalProperty("spark.jobGroup.id"))
jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
data, own = table(spark), {"model": Slow, "clip_norm": 1.0}
fits = [trainer(engine="local", **own).fit(data), trainer(callbacks=[Kill(jvm)], **own).fit(data)]
say(again=[len(one.history) for one in fits],
    weights=[[value.tolist() for value in one.module.state_dict().values()] for one in fits])
"""
    process = subprocess.Popen(
        program(body, tmp_path),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    left = {"slabs": [], "local": [], "persisted": 0, "active": [], "group": None}
    try:
        assert process.stdout is not None
        for times, how in (1, "interrupted"), (2, "at once"):
            assert json.loads(process.stdout.readline()) == {"training": True}
            time.sleep(0.5)
            for _ in range(times):
                interrupted = time.time()
                process.send_signal(signal.SIGINT)
                time.sleep(0.1)
            end = json.loads(process.stdout.readline())
            assert end.pop("how") == how
            assert end.pop("stopped") - interrupted < 15
            assert end == left
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err[-2000:]
    last = json.loads(out)
    assert last["again"] == [3, 3]
    assert last["weights"][0] == last["weights"][1]


def test_the_first_fit_of_a_session_starts_the_daemon(
    spark: Any, table: Any, num_jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "_begun", WeakSet())
    context, before = spark.sparkContext, num_jobs()
    for _ in range(2):
        trainer().fit(table)
    context._jsc.sc().listenerBus().waitUntilEmpty()
    tracker = context.statusTracker()
    jobs = [tracker.getJobInfo(i) for i in range(before, num_jobs())]
    stages = [tracker.getStageInfo(i) for job in jobs for i in job.stageIds]
    starting = [stage for stage in stages if stage and stage.name == "start Python"]
    assert [stage.numTasks for stage in starting] == [1]
    assert starting[0].stageId in jobs[0].stageIds
    assert jobs[0].status == "SUCCEEDED"


@pytest.mark.soak
def test_a_mistake_found_while_the_daemon_starts_is_all_that_is_said(tmp_path: Path) -> None:
    """Spark would report what has not started when the session stops as crashed, and what still runs
    as without its broadcast, where the program goes on. Here the daemon has all the time that it takes
    on a slow machine."""
    body = """
from sparkdl.spark import executors
executors.SECONDS_TO_END = 60
spark = sparkdl.session("local[2]", **QUIET)
data = table(spark)
began = time.time()
try:
    trainer(optimizer=lambda module: 3).fit(data)
except sparkdl.UserError as error:
    say(error=str(error), seconds=time.time() - began)
time.sleep(1)  # the daemon takes 2 s
spark.stop()
time.sleep(4)
"""
    done = subprocess.run(
        program(body, tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    mistake = json.loads(done.stdout)
    assert mistake["error"].startswith("optimizer gave an int")
    assert mistake["seconds"] < 60
    assert [line for line in done.stderr.splitlines() if "incubator" not in line] == []


@pytest.mark.slow
@pytest.mark.soak
def test_a_session_that_stops_right_after_a_python_task_is_quiet(tmp_path: Path) -> None:
    """PySpark's daemon prints a BrokenPipeError for a worker that comes too late to say goodbye: one
    in four."""
    body = """
def same(batches):
    yield from batches

for i in range(4):
    spark = sparkdl.session("local[2]", **QUIET)
    spark.range(0, 4, 1, 2).mapInArrow(same, "id long").collect()
    spark.stop()
"""
    done = subprocess.run(
        program(body, tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "incubator" not in line] == []
