"""Sessions of other masters: one SparkContext lives in a process, so each takes one of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fork_server
import pyspark
import pytest
import torch
from fork_server import PATHS, STACKS

from sparkdl import archive

RESULT = "RESULT "
EXECUTOR_SECONDS = 120.0
STACK_SECONDS = 5.0
"""The time that processes have to print their stacks."""
ROOT = Path(__file__).resolve().parents[1]
ARCHIVE = archive.found(Path(pyspark.__file__).parent)
"""Made by ``make test``, as by ``python -m sparkdl archive``; without it JVMs start slower."""
NO_CONFIGURATION = str(ROOT / "tests" / "no-configuration")
"""A configuration directory of Spark's that is not there."""
SHORT_LIVES = shlex.join(
    [
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-XX:+UnlockDiagnosticVMOptions",
        "-XX:-BytecodeVerificationRemote",
        f"-Dlog4j2.configurationFile={(ROOT / 'conf' / 'log4j2.properties').as_uri()}",
        *([] if ARCHIVE is None else archive.options_with(ARCHIVE)),
    ]
)
"""For JVMs of tests: a session that plans one query takes a third of the processor time."""
QUIET = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sparkdl.progress": "false",
    # Where spark.cores.max is set, executors are there before the first task: else one of them could
    # get every partition.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.driver.extraJavaOptions": SHORT_LIVES,
    "spark.executor.extraJavaOptions": SHORT_LIVES,
}


def launch(
    script: Path,
    folder: Path,
    seconds: float = 550,
    host: tuple[Sequence[str], str] = ((), "127.0.0.1"),
    path: Path | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Run ``script`` with ``spec`` in a fresh process whose working directory is ``folder``.

    What the script hands to :func:`answer` comes back. It and all it started are gone afterwards.
    ``host``: a command in front of its own, which puts it on a host, and that host's address.
    ``path``: the folder of modules that it imports; by default its own.
    """
    prefix, address = host
    python = sys.executable if prefix else fork_server.start()
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*PATHS, str(path or script.parent)]),
        "PYSPARK_PYTHON": python,
        "SPARK_LOCAL_IP": address,
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_HOME": str(_spark_home(folder)),
    }
    command = [*prefix, python, str(script), json.dumps(spec)]
    status, output = run_to_end(command, folder, environment, seconds)
    assert status == 0, output[-4000:]
    return answer_in(output)


def run_to_end(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    """Run a program in ``folder``; return its exit status and all that it printed. What it started is
    gone afterwards."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        before = len((late.output or b"").decode(errors="replace"))
        ask_for_stacks(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=STACK_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        stacks = f"{output[max(0, before - 4000) : before]}\n{output[before:]}"
        raise AssertionError(f"no end after {seconds} s:\n{stacks}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def ask_for_stacks(pid: int) -> None:
    """Let a program, its fork and all that it has started print what their threads do, if they can."""
    for each in fork_server.of_program(pid):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{each}/status").read_text()
            asks = signal.SIGQUIT if status.startswith("Name:\tjava") else STACKS
            handled = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
            if handled and int(handled[1], 16) >> (asks - 1) & 1:
                os.kill(each, asks)


def answer_in(output: str) -> dict[str, Any]:
    """Return what a program that printed ``output`` has handed to :func:`answer`."""
    answers = [line for line in output.splitlines() if line.startswith(RESULT)]
    assert answers, output[-4000:]
    return json.loads(answers[-1].removeprefix(RESULT))


def launch_together(
    path: Path, folder: Path, master: str, parts: dict[str, dict[str, Any]], **given: Any
) -> dict[str, Any]:
    """Call ``run(spark, ...)`` of several modules in one session; return what each of them returns.

    Args:
        path: The folder of the modules.
        folder: The working directory.
        master: The master of the session.
        parts: The arguments for each module, by its name.
        given: What :func:`launch` takes besides, and ``settings``.
    """
    values = {"settings": {}, **given, "master": master, "parts": parts}
    return launch(ROOT / "tests" / "in_one_session.py", folder, path=path, **values)


def asked_for(request: Any, *arguments: str) -> list[Any]:
    """Return what the tests of this file that were selected are parametrized with: a script need not
    run a row that nobody looks at.

    Args:
        request: The request of a fixture.
        arguments: Names of parameters; of several, a row is a tuple.
    """
    found: dict[Any, None] = {}
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and all(name in params for name in arguments):
            values = tuple(params[name] for name in arguments)
            found[values if len(values) > 1 else values[0]] = None
    return list(found)


def soak_but(quick: Sequence[Any], rows: Iterable[Any]) -> list[Any]:
    """Return ``rows`` as parameters; those that are not in ``quick`` soak."""
    given = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [
        pytest.param(
            *row, marks=() if (row if len(row) > 1 else row[0]) in quick else pytest.mark.soak
        )
        for row in given
    ]


def in_turn(cases: Iterable[Any], others: Sequence[Any], spared: Sequence[Any] = ()) -> list[Any]:
    """Return each case with each of ``others`` as parameters; all but one of these, in turn, soak. The
    cases in ``spared`` soak with all of them."""
    found, number = [], 0
    for case in cases:
        quick = -1 if case in spared else number % len(others)
        number += case not in spared
        for n, other in enumerate(others):
            found.append(pytest.param(case, other, marks=() if n == quick else pytest.mark.soak))
    return found


def _spark_home(folder: Path) -> Path:
    """The installed Spark by links: executors of a local-cluster make their folders in it."""
    home = folder / "spark"
    home.mkdir(exist_ok=True)
    for path in Path(pyspark.__file__).parent.iterdir():
        if path.name != "work" and not (home / path.name).exists():
            (home / path.name).symlink_to(path)
    return home


def spec() -> dict[str, Any]:
    """In the script: what :func:`launch` was given."""
    return json.loads(sys.argv[1])


def answer(value: dict[str, Any]) -> None:
    """In the script: hand ``value`` back."""
    print(RESULT + json.dumps(value), flush=True)


@contextlib.contextmanager
def session(master: str, **settings: str) -> Iterator[Any]:
    """A quiet session on ``master``; ``settings`` with dots in their names win. All executors of a
    local-cluster are there: Spark itself does not wait for them without ``spark.cores.max``."""
    import sparkdl

    spark = sparkdl.session(master, **{**QUIET, **settings})
    try:
        if cluster := re.match(r"local-cluster\[(\d+)", master):
            wait_for_executors(spark.sparkContext, int(cluster[1]))
        yield spark
    finally:
        spark.stop()


def wait_for_executors(context: Any, count: int) -> None:
    """Until so many are there, or are there again."""
    deadline = time.monotonic() + EXECUTOR_SECONDS
    while context._jsc.sc().getExecutorMemoryStatus().size() != count + 1:  # and the driver
        assert time.monotonic() < deadline, f"not {count} executors in {EXECUTOR_SECONDS} s"
        time.sleep(0.05)


def digest(module: torch.nn.Module) -> str:
    """MD5 over the bytes of the state dict."""
    md5 = hashlib.md5(usedforsecurity=False)
    for name, tensor in module.state_dict().items():
        md5.update(name.encode())
        md5.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return md5.hexdigest()
