"""What is told of a Spark job that failed, out of Spark's report."""

from __future__ import annotations

import re
import sys
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.worker_util import check_python_version

import sparkdl
from sparkdl.errors import DataError, SessionError, TrainingError
from sparkdl.spark import failures
from sparkdl.spark.failures import (
    end_of_session_explained,
    explain,
    faults_explained,
    reading_explained,
)

FAILED = (
    "An error occurred while calling o93.collectToPython.\n: org.apache.spark.SparkException: Job "
    "aborted due to stage failure: Task 3 in stage 7.0 failed 4 times, most recent failure: Lost task "
    "3.3 in stage 7.0 (TID 9) (10.0.0.1 executor 2): "
)
LOST = "ExecutorLostFailure (executor 2 exited unexpectedly) Reason: Command exited with code 137"
DRIVERS = """
Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.$anonfun$abortStage$2(DAGScheduler.scala:2935)
\tat org.apache.spark.sql.execution.QueryExecution$.withInternalError(QueryExecution.scala:927)
Caused by: java.lang.IllegalStateException: of the driver
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (LOST, LOST),
        (
            "java.lang.OutOfMemoryError: Java heap space\n\tat java.base/java.util.Arrays.copyOf()",
            "Java heap space",
        ),
        (
            "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)\n\tat "
            "org.apache.spark.api.python.BasePythonRunner.run(PythonRunner.scala:1)",
            "The Python worker died: it was killed, ran out of memory, or crashed.",
        ),
    ],
)
def test_a_task_that_failed_outside_python(said: str, told: str) -> None:
    """The driver's own stack says nothing of it."""
    place = "partition 3 on 10.0.0.1 executor 2 failed 4 times. "
    assert explain(FAILED + said + DRIVERS) == place + told


@pytest.mark.parametrize(
    "said",
    [
        "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)\n\tat o.a.S",
        "Traceback (most recent call last):\n  File 'a'\nOSError: [Errno 12] Cannot allocate memory",
        "Traceback (most recent call last):\n  File 'a'\nMemoryError",
        "Traceback (most recent call last):\n  File 'a'\nRuntimeError: [enforce fail at cpu.cpp:127] "
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 640 bytes",
    ],
)
@pytest.mark.parametrize("limit", ["1500m", None])
def test_a_limit_of_memory_is_named(
    said: str, limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = {"spark.executor.pyspark.memory": limit}
    context = SimpleNamespace(_conf=conf) if limit else None
    monkeypatch.setattr(failures.SparkContext, "_active_spark_context", context)
    assert ("raise or unset it" in explain(FAILED + said)) == bool(limit)
    if limit:
        assert "spark.executor.pyspark.memory=1500m limits" in explain(FAILED + said)
    monkeypatch.setattr(failures.SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(failures.resource, "getrlimit", lambda kind: (3 << 29, 3 << 29))
    assert "ulimit -v limits the address space of a process to 1.5 GiB" in explain(FAILED + said)


def test_a_job_that_failed_without_a_task() -> None:
    stack = "\n\tat org.apache.spark.errors.SparkCoreErrors$.stopped(SparkCoreErrors.scala:1)"
    assert (
        explain(f"o1.collect{stack}\njava.lang.IllegalStateException: stopped{stack}") == "stopped"
    )
    assert explain("cancelled by hand") == "cancelled by hand"


def test_a_job_in_the_background_tells_its_cause():
    stack = "\n\tat java.base/java.util.concurrent.CompletableFuture.get(CompletableFuture.java:1)"
    cause = "Could not compute split, block rdd_1_0 of RDD 2 not found"
    said = (
        "An error occurred while calling o89.get.\n: java.util.concurrent.ExecutionException: "
        f"Exception thrown by job{stack}\nCaused by: org.apache.spark.SparkException: {cause}{stack}"
        "\n\t... 1 more\n"
    )
    assert explain(said) == cause
    assert explain(said.partition("\nCaused")[0]) == "Exception thrown by job"


LACKS = (
    "/env/bin/python: Error while finding module specification for 'sparkdl.daemon' "
    "(ModuleNotFoundError: No module named 'sparkdl')"
)
NEEDS = "The Python of the executors (spark.pyspark.python) needs sparkdl, torch"
TRACE = """Traceback (most recent call last):
  File "/env/sparkdl/collectives/communicator.py", line 11, in <module>
ModuleNotFoundError: No module named 'torch'"""


@pytest.mark.parametrize(
    ("said", "reason", "hinted"),
    [
        (LACKS, LACKS, True),
        (TRACE, "ModuleNotFoundError: No module named 'torch'", True),
        ("/env/bin/python: killed", "/env/bin/python: killed", False),
    ],
)
def test_a_python_that_does_not_start(said: str, reason: str, hinted: bool) -> None:
    """What it printed is the reason, which Spark indents and puts between lines of its own."""
    told = explain(
        f"{FAILED}org.apache.spark.SparkException: \nError from python worker:\n"
        f"{textwrap.indent(said, '  ')}\nPYTHONPATH was:\n  /spark/python/lib/pyspark.zip\n"
        "org.apache.spark.SparkException: EOFException occurred while reading the port number from "
        f"sparkdl.daemon's stdout.\n\tat org.apache.spark.Some.method(Some.scala:1)\n{DRIVERS}"
    )
    first, _, rest = told.partition("\n")
    assert first.startswith(
        f"partition 3 on 10.0.0.1 executor 2 failed 4 times. Python did not start: {reason}."
    )
    assert (NEEDS in first) == hinted
    assert rest == (said if "\n" in said else "")


def test_a_module_that_is_missing_on_the_executors_is_told_with_the_remedy() -> None:
    first = explain(f"{FAILED}org.apache.spark.SparkException: {TRACE}\n\tat org.a.B.c(B.scala:1)")
    assert 'The executors have no module "torch". Install it there, or ship it' in first
    assert "addPyFile" in first.partition("\n")[0]


@pytest.mark.parametrize(("said", "module"), [(LACKS, "sparkdl"), (TRACE, "torch")])
def test_executors_that_can_run_no_task_are_told_in_one_sentence(said: str, module: str) -> None:
    folder = Path(str(sys.modules[module].__file__)).parent
    for explained in (reading_explained(), faults_explained("reading")):
        with pytest.raises(sparkdl.SessionError) as caught, explained:
            raise PySparkException(f"{FAILED}org.apache.spark.SparkException: \n{said}\n")
        assert re.sub(r' \(".*"\)', "", str(caught.value)) == (
            f"the Python of the executors has no {module}, which the driver imports from {folder}: "
            "install it there, or ship it with spark-submit --py-files or --archives, as "
            "docs/guide/packaging.md says."
        )


def test_interpreters_of_two_versions_are_named() -> None:
    """PySpark's words are those of its own check, which a worker of another version would raise."""
    with pytest.raises(PySparkRuntimeError) as differs:
        check_python_version("2.7")
    here = ".".join(map(str, sys.version_info[:2]))
    for explained in (reading_explained(), faults_explained("reading")):
        with pytest.raises(sparkdl.SessionError) as caught, explained:
            raise differs.value
        assert str(caught.value).startswith(f"the executors run Python {here} ")
        assert f'the driver Python 2.7 ("{sys.executable}")' in str(caught.value)
        assert "spark.pyspark.python" in str(caught.value)


def test_frames_of_pysparks_worker_are_left_out() -> None:
    """A Spark Connect session reports them whatever its settings are."""
    place = "/env/pyspark/python/lib/pyspark.zip/pyspark/worker.py"
    worker = f'  File "{place}", line 1, in f\n    f()\n    ^^^\n'
    own = '  File "/home/me/program.py", line 2, in label\n    raise KeyError("no")\n'
    head, end = "Traceback (most recent call last):\n", "KeyError: 'no'"
    assert explain(head + worker * 2 + own + end) == f"{end}\n{head}{own}{end}"


CALL = (
    '<_{} of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n\tdetails = "gone."\n>'
)


@pytest.mark.parametrize("explained", [reading_explained, partial(faults_explained, "training")])
@pytest.mark.parametrize(
    ("said", "told"),
    [
        (CALL.format("MultiThreadedRendezvous"), "(gone)"),
        (CALL.format("InactiveRpcError"), "(gone)"),
        ("[NO_ACTIVE_SESSION] No session found. Make one.", "(No session found. Make one)"),
        (
            "(org.apache.spark.SparkSQLException) [INVALID_HANDLE.SESSION_CLOSED] It was closed.",
            "(It was closed)",
        ),
        (
            "[RETRIES_EXCEEDED] The maximum number was exceeded.",
            "(The maximum number was exceeded)",
        ),
    ],
)
def test_a_server_that_went_away_is_no_fault_of_the_data(
    explained: Any, said: str, told: str
) -> None:
    message = re.escape(f"its server went away {told}. Make a new one")
    with pytest.raises(SessionError, match=message), explained():
        raise PySparkException(said)


@pytest.mark.parametrize("explained", [reading_explained, partial(faults_explained, "training")])
def test_a_query_that_was_cancelled_is_no_fault_of_the_data(explained: Any) -> None:
    said = "(org.apache.spark.SparkSQLException) [OPERATION_CANCELED] Operation has been canceled."
    with pytest.raises(TrainingError, match="the query was cancelled, by"), explained():
        raise PySparkException(said)


@pytest.mark.parametrize("explained", [reading_explained, partial(faults_explained, "training")])
@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("sparkdl.errors.StaleReferenceError: slab /dev/shm/a was deleted", True),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/sparkdl-local-1-{}/a'",
            True,
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/sparkdl-run/a.png'",
            False,
        ),
        ("sparkdl.errors.SlabFullError: no room in /tmp/sparkdl-local-1-{}", False),
    ],
)
def test_deleted_slabs_are_lost_state(explained: Any, said: str, lost: bool) -> None:
    """As are stored blocks. Files of the user's are not."""
    task = f"Traceback (most recent call last):\n  some\n{said.format('0f' * 8)}"
    for text in (task, "java: Could not compute split, block rdd_3_0 of RDD 5 not found"):
        with pytest.raises(sparkdl.SparkdlError) as caught, explained():
            raise PySparkException(text)
        assert isinstance(caught.value, sparkdl.StateLostError) == (lost or text is not task)


@pytest.mark.parametrize(
    ("stopped", "raised", "told"),
    [
        (
            True,
            ValueError("Cannot invoke RPC: Channel closed!"),
            "it was stopped while it was in use",
        ),
        (True, DataError("the data cannot be read"), "it was stopped while it was in use"),
        (False, PySparkException(CALL.format("InactiveRpcError")), "its server went away (gone)"),
    ],
)
def test_a_session_that_ends_in_use_is_told(stopped: bool, raised: Exception, told: str) -> None:
    session = SimpleNamespace(is_stopped=stopped)
    with pytest.raises(SessionError, match=re.escape(told)), end_of_session_explained(session):
        raise raised


@pytest.mark.parametrize(
    "error", [ValueError("no"), DataError("no"), PySparkException("no"), KeyboardInterrupt("no")]
)
def test_other_errors_of_a_session_in_use_stay(error: BaseException) -> None:
    running = SimpleNamespace(is_stopped=False)
    with pytest.raises(type(error)) as caught, end_of_session_explained(running):
        raise error
    assert caught.value is error


def test_another_server_that_the_users_code_calls_is_not_sparks() -> None:
    said = 'PythonException: Traceback (most recent call last):\n  File "f.py", line 1, in f\ngrpc.'
    with pytest.raises(DataError, match="InactiveRpcError"), reading_explained():
        raise PySparkException(said + CALL.format("InactiveRpcError"))
