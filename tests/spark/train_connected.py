"""Cases of training in a session of Spark Connect, which ``score_connected`` runs in its session."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import connected_fits
import torch
import torch.distributed as dist
from launch import ROOT, digest
from torch import nn

import sparkdl
import sparkdl.connect.fit
import sparkdl.gang.connect
import sparkdl.tune
from sparkdl.checkpoint.store import CheckpointStore


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except (sparkdl.SparkdlError, KeyError, connected_fits.SeveralArguments) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def digests(trained: Any) -> list[str]:
    found = [trained, trained.ema, trained.best]
    return [digest(one.module) for one in found if one is not None]


def training(
    folder: Path, data: Any, names: list[str], mistakes: list[str], kills: list[str]
) -> dict[str, Any]:
    """The digests of all fits, and what else fits do."""
    trainers = connected_fits.fits(data)
    result: dict[str, Any] = {"digests": {}}
    for name in names:
        result["digests"][name] = digests(trainers[name].fit(data))
    good = trainers["perceptron"]
    bad = connected_fits.bad_fits(data)
    result["messages"] = {name: told(bad[name]) for name in mistakes}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparkdl").addHandler(handler)
    note = connected_fits.Note(folder / "note")
    noting = replace(good, engine="shuffle", callbacks=[note])
    by_default = noting.fit(data)
    result["default engine"] = digests(by_default)
    process, *noted = (folder / "note").read_text().split()
    result["noted"] = [int(process) != os.getpid(), *noted, note.iterations]
    lock: Any = threading.Lock()
    note.path = lock
    result["callback"] = told(lambda: replace(good, callbacks=[note]).fit(data))
    result["classic only"] = {
        "local": told(lambda: replace(good, engine="local").fit(data)),
        "min_ranks": told(lambda: replace(good, min_ranks=1).fit(data)),
        "staleness": told(
            lambda: replace(
                good, engine="shuffle", consistency=sparkdl.StaleSynchronous(staleness=1)
            ).fit(data)
        ),
        "session": told(sparkdl.session),
    }
    result["slots"] = told(lambda: replace(good, replicas=9).fit(data))
    result["pass"] = digest(good.partial_fit(data.where("kind % 2 = 0")).module)
    result["killed"] = {}
    most, sparkdl.connect.fit.MAX_ROWS_BYTES = sparkdl.connect.fit.MAX_ROWS_BYTES, 10
    result["no path"] = told(lambda: good.fit(data))
    for name in kills:
        if name == "the beginning":
            sparkdl.connect.fit.MAX_ROWS_BYTES = most
        kill = connected_fits.Kill(folder / f"killed {name}", 7)
        where = None if name == "the beginning" else sparkdl.Checkpoint(folder / "checkpoints")
        trained = replace(good, callbacks=[kill], checkpoint=where).fit(data)
        result["killed"][name] = [*digests(trained), len(trained.history.last(1000))]
    sparkdl.connect.fit.MAX_ROWS_BYTES = most
    result["log"] = records
    result["left"] = [name for name in os.listdir(folder / "checkpoints") if "result" in name]
    result["slabs"] = os.listdir(folder / "slabs")
    return result


def replayed(data: Any) -> dict[str, Any]:
    trainer = replace(connected_fits.fits(data)["perceptron"], engine="shuffle")
    history = trainer.fit(data).history
    content = json.loads(history.to_json_bytes())
    content["decisions"] = {"micro_batches/0": [1] * len(content["iterations"])}
    dropped = sparkdl.History.from_json_bytes(json.dumps(content).encode())
    return {
        "synchronous": digests(trainer.fit(data, replay=history)),
        "dropped": told(lambda: trainer.fit(data, replay=dropped)),
    }


def sends(spark: Any, data: Any, model: Any) -> int:
    """How many files an evaluation of a large model and a prediction send."""
    sent: list[Any] = []
    add = type(spark).addArtifacts
    type(spark).addArtifacts = lambda self, *paths, **kinds: (
        sent.append(paths),
        add(self, *paths, **kinds),
    )
    try:
        model.evaluate(data, metrics=["mse"])
        model.transform(data).count()
    finally:
        type(spark).addArtifacts = add
    return len(sent)


def guide(spark: Any, folder: Path) -> list[str]:
    """Run the page of the guide, and return the metrics that it finds."""
    text = (ROOT / "docs" / "guide" / "connect.md").read_text()
    namespace: dict[str, Any] = {"spark": spark, "__name__": "__main__"}
    before = os.getcwd()
    os.chdir(folder)
    try:
        for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            exec(block, namespace)
    finally:
        os.chdir(before)
    return sorted(namespace["scores"])


def pipeline(data: Any) -> dict[str, Any]:
    import sparkdl.ml

    stage = sparkdl.ml.TorchClassifier(
        model=lambda: nn.Linear(5, 2),
        optimizer=torch.optim.Adam,
        featuresCol="x",
        labelCol="y",
        maxEpochs=1,
        replicas=2,
    )
    model = stage.fit(data)
    return {
        "columns": model.transform(data).columns,
        "refused": [
            told(lambda: model.save("saved")),
            told(lambda: model.write().overwrite().save("saved")),
            told(lambda: stage.save("saved")),
        ],
    }


def _interrupt(at: list[float], times: int, record: logging.LogRecord) -> None:
    """Interrupt when training has begun, and when that interrupt is told of, so many times in all."""
    if (record.getMessage() == connected_fits.BEGUN or at) and len(at) < times:
        at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)


def interrupted(spark: Any, folder: Path, data: Any) -> dict[str, Any]:
    """Interrupts in the middle of a long fit: what comes back, when slots are free, what is left."""
    begin = connected_fits.LogBegin()
    trainer = replace(
        connected_fits.fits(data)["perceptron"], stop=sparkdl.max_epoch(100_000), callbacks=[begin]
    )
    handler = logging.Handler()
    logging.getLogger("sparkdl").addHandler(handler)
    result: dict[str, Any] = {}
    shown = io.StringIO()
    spark.conf.set("spark.sparkdl.progress", "true")
    for times in (1, 2):
        at: list[float] = []
        handler.emit = partial(_interrupt, at, times)  # type: ignore[method-assign]
        try:
            with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
                trained = trainer.fit(data)
            told = [str(trained.history.stopped), len(trained.history) > 0]
        except KeyboardInterrupt:
            told = ["KeyboardInterrupt"]
        ranks = sparkdl.gang.run(os.getpid, ranks=2, spark=spark)
        result[str(times)] = {
            "told": told,
            "ranks": len(ranks),
            "seconds": time.monotonic() - at[-1],
            "slabs": os.listdir(folder / "slabs"),
        }
    spark.conf.set("spark.sparkdl.progress", "false")
    logging.getLogger("sparkdl").removeHandler(handler)
    return {**result, "shown": shown.getvalue()}


def placed(data: Any) -> dict[str, Any]:
    """Fits on samples that were persisted once."""
    trainer = connected_fits.fits(data)["mixed"]
    with sparkdl.PlacedSamples.of(trainer, data) as samples:
        found = {
            "digests": [digests(replace(trainer, seed=i).fit(samples)) for i in (0, 1)],
            "differs": told(lambda: replace(trainer, replicas=1).fit(samples)),
        }
    return {**found, "closed": told(lambda: trainer.fit(samples))}


def logged(folder: Path, data: Any) -> dict[str, Any]:
    """A fit that TensorBoard and the active run of MLflow show."""
    import mlflow

    from sparkdl.summaries import MLflow, TensorBoard

    trainer = connected_fits.fits(data)["perceptron"]
    mlflow.set_tracking_uri((folder / "runs").as_uri())
    with mlflow.start_run() as run:
        shown = MLflow()
        replace(trainer, callbacks=[TensorBoard("events"), shown]).fit(data)
    own = MLflow(run_name="own")
    mlflow.set_experiment("of the client")
    replace(trainer, callbacks=[own]).fit(data)
    client = mlflow.MlflowClient()
    active, another = client.get_run(run.info.run_id), client.get_run(own.run_id)
    return {
        "events": len(os.listdir("events")),
        "same": shown.run_id == run.info.run_id,
        "metrics": sorted(active.data.metrics),
        "status": [active.info.status, another.info.status],
        "experiment": client.get_experiment(another.info.experiment_id).name,
    }


def refused(spark: Any, data: Any) -> dict[str, str]:
    """What a user may get wrong only here."""
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    good, lock = connected_fits.fits(data)["perceptron"], threading.Lock()
    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build
    module = Path("only_here.py").absolute()
    module.write_text("def same(value):\n    return value\n")
    sys.path.insert(0, str(module.parent))
    only_here = importlib.import_module("only_here")
    module.unlink()
    columns = {"x": sparkdl.Convert(only_here.same)}
    return {
        "module": told(lambda: replace(good, columns=columns).fit(data)),
        "session": told(lambda: good.fit(spark)),
        "column": told(lambda: sparkdl.tune.search(good, data["x"], {"batch_size": [8]})),
        "stop": told(lambda: replace(good, stop=connected_fits.Held(lock)).fit(data)),
        "frame": told(lambda: replace(good, stop=connected_fits.Held(data)).fit(data)),
        "profile": told(lambda: replace(good, resource_profile=profile).fit(data)),
        "exception": told(lambda: replace(good, callbacks=[connected_fits.Raises()]).fit(data)),
        "function": told(lambda: sparkdl.gang.run(lock.acquire, ranks=2, spark=spark)),
    }


def groups(data: Any) -> dict[str, Any]:
    """A model for each group of rows."""
    found = sparkdl.fit_groups(data, "kind", connected_fits.by_group())
    some = found.transform(data).where("kind = 2")
    result = {
        "groups": connected_fits.of_groups(found),
        "predicted": some.where("prediction IS NOT NULL").count() == some.count() > 0,
        "no group": told(lambda: found.model(9)),
        "a mistake": told(lambda: sparkdl.fit_groups(data, "sort", connected_fits.by_group())),
    }
    found.unpersist()
    return result


def streamed(spark: Any, folder: Path, data: Any) -> str:
    """The digest of a model that learns from a batch of a stream, whose session is not the client's."""
    kept = str(folder / "streamed")
    trainer = replace(connected_fits.fits(data)["mixed"], checkpoint=sparkdl.Checkpoint(kept))

    def learn(batch: Any, number: int) -> None:
        trainer.partial_fit(batch, resume="latest")

    data.write.parquet(str(folder / "stream"))
    rows = spark.readStream.schema(data.schema).parquet(str(folder / "stream"))
    query = rows.writeStream.foreachBatch(learn).trigger(availableNow=True)
    query.option("checkpointLocation", str(folder / "query")).start().awaitTermination()
    return digest(sparkdl.load(kept, model=connected_fits.Mixed).module)


def search(data: Any) -> dict[str, Any]:
    """A search, whose trials run side by side."""
    found = connected_fits.search(data)
    trainer = replace(connected_fits.fits(data)["mixed"], checkpoint=sparkdl.Checkpoint("place"))
    return {
        "trials": connected_fits.of_search(found),
        "best": digest(found.best_model.module),
        "reason": sparkdl.tune.search(
            replace(connected_fits.fits(data)["mixed"], callbacks=[connected_fits.Raises()]),
            data,
            {"batch_size": [100]},
            algorithm="grid",
            parallel=1,
        )
        .trials[0]
        .reason,
        "checkpoints": told(
            lambda: sparkdl.tune.search(trainer, data, {"batch_size": [8]}, parallel=1)
        ),
    }


def texts(spark: Any, rows: list[str], folder: str) -> dict[str, Any]:
    data = spark.createDataFrame(
        [(number, text) for number, text in enumerate(rows)], "n int, text string"
    )
    classes = sparkdl.classify(data, folder).orderBy("n").collect()
    vectors = sparkdl.embed(data, folder, pooling="cls").orderBy("n").collect()
    return {
        "scores": [row.score for row in classes],
        "vectors": [list(row.embedding) for row in vectors],
    }


def readme(spark: Any) -> str:
    """Run the README's program, and return what it prints."""
    text = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    first = 'spark = sparkdl.session("local[2]")\n'
    assert first in program
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program.replace(first, ""), {"spark": spark, "__name__": "__main__"})
    return printed.getvalue()


def orphan(spark: Any, place: Path, data: str, seconds: str, slots: int) -> dict[str, Any]:
    """Kill a client while it trains, and continue its run when that has ended.

    Args:
        spark: The session.
        place: The folder of the checkpoints.
        data: The path of the data.
        seconds: How long the run goes on without a sign of its client; "off": until Spark ends it.
        slots: The task slots of the session.
    """
    from pyspark.sql.connect.client import DefaultChannelBuilder

    url = f"sc://localhost:{DefaultChannelBuilder.default_port()}"
    script = str(Path(__file__).with_name("connected_client.py"))
    client = subprocess.Popen([sys.executable, script, url, data, str(place), seconds])
    deadline = time.monotonic() + 120
    while not _newest(place) and time.monotonic() < deadline:
        assert client.poll() is None
        time.sleep(0.1)
    client.kill()
    client.wait()
    alone = time.monotonic()
    ranks = len(sparkdl.gang.run(os.getpid, ranks=slots, spark=spark))  # waits until it has ended
    alone = time.monotonic() - alone
    last = _newest(place)
    table = spark.read.parquet(data)
    trainer = replace(
        connected_fits.fits(table)["perceptron"],
        stop=sparkdl.max_iteration(last + 3),
        checkpoint=sparkdl.Checkpoint(place),
    )
    trained = trainer.fit(table, resume="latest")
    return {"ranks": ranks, "last": last, "iterations": len(trained.history), "alone": alone}


def _newest(folder: Path) -> int:
    """The iteration of the newest checkpoint; 0 without one."""
    if not folder.exists():
        return 0
    found = CheckpointStore(folder).candidates()
    return next((manifest.iteration for _, manifest in found), 0)


def summed(value: float) -> Any:
    tensor = torch.ones(1) * (dist.get_rank() + value)
    dist.all_reduce(tensor)
    print("of", os.environ["WORLD_SIZE"])
    return {"sum": tensor, "rank": int(os.environ["LOCAL_RANK"])}


def fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no luck")
    dist.barrier()


def dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def gangs(spark: Any) -> dict[str, Any]:
    """Functions on ranks."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = sparkdl.gang.run(summed, 1.0, ranks=2, spark=spark, output=True)
    return {
        "results": [[each["sum"].item(), each["rank"]] for each in found],
        "printed": sorted(printed.getvalue().splitlines()),
        "slots": len(sparkdl.gang.run(os.getpid)),
        "fails": told(lambda: sparkdl.gang.run(fails, ranks=2, spark=spark)),
    }


def more_gangs(spark: Any) -> dict[str, Any]:
    """Functions on ranks with large arguments and results, one that exits; and how fast gangs are."""
    report = sparkdl.diagnose(spark)
    return {
        "engines": [*report.milliseconds, *report.reasons],
        "large": sparkdl.gang.run(len, bytes(3 << 20), ranks=2, spark=spark),
        "too large": told(lambda: sparkdl.gang.run(bytes, 70_000_000, ranks=2, spark=spark)),
        "exits": told(lambda: sparkdl.gang.run(sys.exit, 3, ranks=2, spark=spark)),
    }


def waits(spark: Any, data: Any) -> dict[str, Any]:
    """Ranks that never answer, gangs that wait for another one, and a session without slots."""
    result: dict[str, Any] = {
        "dies": told(lambda: sparkdl.gang.run(dies, ranks=2, spark=spark)),
        "late": told(lambda: sparkdl.gang.run(time.sleep, 30, ranks=2, spark=spark, timeout=1.5)),
    }
    silent, sparkdl.gang.connect.SILENT_SECONDS = sparkdl.gang.connect.SILENT_SECONDS, 3.0
    with ThreadPoolExecutor(2) as threads:  # one waits for the other
        both = [
            threads.submit(sparkdl.gang.run, time.sleep, 4, ranks=2, spark=spark) for _ in range(2)
        ]
        result["in turn"] = [each.result() for each in both]
    # as where nobody can tell the slots
    seen, sparkdl.gang.connect._seen = (
        sparkdl.gang.connect._seen,
        {spark.session_id: sparkdl.gang.connect.Nodes(9, ())},
    )
    result["silent"] = [
        told(lambda: sparkdl.gang.run(os.getpid, ranks=9, spark=spark)),
        told(lambda: replace(connected_fits.fits(data)["perceptron"], replicas=9).fit(data)),
    ]
    sparkdl.gang.connect.SILENT_SECONDS, sparkdl.gang.connect._seen = silent, seen
    return result


def stopped(spark: Any, data: Any) -> list[str]:
    """Return the errors of a fit whose session is stopped meanwhile, and of calls afterwards."""
    endless = replace(
        connected_fits.fits(data)["perceptron"],
        stop=sparkdl.max_epoch(100_000),
        callbacks=[connected_fits.LogBegin()],
    )
    handler = logging.Handler()
    stop = threading.Thread(target=spark.stop)
    handler.emit = lambda record: (  # type: ignore[method-assign]
        stop.start() if record.getMessage() == connected_fits.BEGUN else None
    )
    logging.getLogger("sparkdl").addHandler(handler)
    meanwhile = told(lambda: endless.fit(data))
    stop.join()
    return [
        meanwhile,
        told(lambda: connected_fits.fits(data)["weighted"].fit(data)),
        told(lambda: sparkdl.gang.run(os.getpid, ranks=2, spark=spark)),
    ]


PARTS: dict[str, Callable[[Any, Path, Any, dict[str, Any]], Any]] = {
    "interrupted": lambda spark, folder, data, given: interrupted(spark, folder, data),
    "placed": lambda spark, folder, data, given: placed(data),
    "logged": lambda spark, folder, data, given: logged(folder, data),
    "refused": lambda spark, folder, data, given: refused(spark, data),
    "groups": lambda spark, folder, data, given: groups(data),
    "streamed": lambda spark, folder, data, given: streamed(spark, folder, data),
    "search": lambda spark, folder, data, given: search(data),
    "texts": lambda spark, folder, data, given: texts(spark, given["texts"], given["bert"]),
    "readme": lambda spark, folder, data, given: readme(spark),
    "orphan": lambda spark, folder, data, given: orphan(
        spark, folder / "orphan", given["data"], "off", slots=2
    ),
    "guide": lambda spark, folder, data, given: guide(spark, folder),
    "pipeline": lambda spark, folder, data, given: pipeline(data),
    "replayed": lambda spark, folder, data, given: replayed(data),
    "gangs": lambda spark, folder, data, given: gangs(spark),
    "more gangs": lambda spark, folder, data, given: more_gangs(spark),
    "waits": lambda spark, folder, data, given: waits(spark, data),
}
"""The parts of the work that tests may need, by name."""
