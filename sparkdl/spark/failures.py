"""What made a Spark job fail, out of Spark's long report: the task, the node, the Python error."""

from __future__ import annotations

import re
import textwrap

from sparkdl.spark.frames import PLACE
from sparkdl.usercode.travel import REMEDY

WAITED = "sparkdl waited"
"""How the reason begins where a job was cancelled because nothing happened in it."""
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_TASK = re.compile(
    r"Task (?P<partition>\d+) in stage [\d.]+ failed (?P<attempts>\d+) times?, most recent "
    r"failure: Lost task \S+ in stage \S+ \(TID \d+\) \((?P<node>[^)]*)\)"
)
_TRACE = re.compile(r"Traceback \(most recent call last\):\n.*?(?=\n\s*at |\n ?SQLSTATE|\Z)", re.S)
_NOT_STARTED = re.compile(r"Error from python worker:\n(?P<said>.*?)\n *PYTHONPATH was:", re.S)
_WAITED = re.compile(rf"{WAITED} .*?timeout\.seconds\.", re.S)
_JAVA_CLASS = re.compile(r"^(:? ?(Caused by: )?(java|org)\.[\w.]+: )+")
_FUTURE = re.compile(r"^:? ?java\.util\.concurrent\.ExecutionException: ")
"""What Java puts around the error of a job that runs in the background."""


def of_python(text: str) -> bool:
    """Whether Spark reports an exception of Python's, with its traceback."""
    return _TRACE.search(text) is not None


def explain(text: str) -> str:
    """One line with partition, node, attempts and error; then the Python traceback, if any.

    Spark names the task where it reports the failed job. Since 4.1 it reports a Python error in a
    task as that error alone, and the place is the one that the task noted, see ``map_frames``.
    """
    waited = _WAITED.search(text)
    if waited:
        return waited[0]
    place = PLACE.search(text) or _TASK.search(text)
    where = ""
    if place:
        attempts = int(place["attempts"])
        times = "once" if attempts == 1 else f"{attempts} times"
        where = f"partition {place['partition']} on {place['node']} failed {times}. "
    started = _NOT_STARTED.search(text)
    if started:  # Spark indents what the daemon said
        said = textwrap.dedent(started["said"]).strip()
        return f"{where}{_did_not_start(said)}"
    trace = _TRACE.search(text)
    if trace:
        lines = PLACE.sub("", trace[0]).strip().splitlines()
        heads = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
        after = [line for line in lines[heads[-1] + 1 :] if line and not line.startswith(" ")]
        first = after[0] if after else lines[-1]
        if missing := _MISSING.match(first):
            first += f'. The executors have no module "{missing[1]}". {REMEDY}'
        return f"{where}{first}\n" + "\n".join(lines)
    if place:  # no Python error: what Spark says after naming the task
        first = text[place.end() :].lstrip(": ").partition("\n")[0]
    else:
        lines = [line for line in text.splitlines() if not line.startswith("\tat ")]
        named = [line for line in lines if "Exception" in line or "Error" in line]
        causes = [line for line in named if not _FUTURE.match(line)]
        first = next(iter(causes or named), text)
    reason = _JAVA_CLASS.sub("", first.strip())
    if reason.startswith("Python worker exited unexpectedly"):
        reason = "The Python worker died: it was killed, ran out of memory, or crashed."
    return where + reason


def _did_not_start(said: str) -> str:
    """Of an executor whose Python ends before it takes tasks, and of what it printed."""
    *before, last = said.splitlines() or ["it said nothing"]
    hint = (
        " The Python of the executors (spark.pyspark.python) needs sparkdl, torch and what they need: "
        "install them there, or ship an environment with --archives."
        if "No module named" in last
        else ""
    )
    return f"Python did not start: {last}.{hint}" + (f"\n{said}" if before else "")
