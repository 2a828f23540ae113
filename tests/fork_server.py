"""Python processes that need not import torch: each is a fork of one that has.

Spark's daemon of Python workers, and a script of a test, begin with imports that take ten seconds of a
processor; the suite starts a hundred of them. So the tests start one process that imports everything,
and ``PYSPARK_PYTHON`` is a program, ``forked_python.py``, that asks it for a fork with its own
arguments, environment, working directory, and open files. What runs in the fork is what ``python -m
DAEMON`` or ``python SCRIPT`` runs, or the server of :mod:`multiprocessing`. All other programs get an
interpreter of their own, as does one with another value of a variable that is read when a library is
loaded.

Before it imports anything of sparkdl's, that process forks one that never will: :func:`run_fresh` runs
programs in forks of this one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_SPARKDL = importlib.util.find_spec("sparkdl")
assert _SPARKDL is not None
assert _SPARKDL.origin is not None
PATHS = [str(Path(__file__).parent), str(Path(_SPARKDL.origin).parents[1])]
"""The paths of the tests' helpers and of the very package that the tests import."""
FOLDER = "SPARKDL_TESTS_FORKS"
"""The variable with the path of the server's folder."""
WITHOUT = "SPARKDL_TESTS_WITHOUT_FORKS"
"""The variable with a folder of programs that are no forks, if there are to be none."""
STACKS = signal.SIGUSR1
"""The signal at which forks print the stacks of their threads."""
NAME = "python:"
"""The beginning of the name of a program that asked; the number of its fork follows."""


def start() -> str:
    """Return the path of the program that asks for a fork of the process that has everything."""
    if FOLDER not in os.environ:
        begin()
    return str(Path(os.environ[FOLDER], "python"))


def fresh() -> str:
    """Return the path of the program that asks for a fork of the process that has the libraries."""
    return str(Path(start()).with_name("fresh"))


def run_fresh(
    code: str, *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``python -c`` does.

    Args:
        code: The program.
        arguments: What it finds in ``sys.argv``.
        cwd: Its working directory, which is also the first of its path.
        environment: Variables that are set for it besides.
    """
    return subprocess.run(
        [fresh(), "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def begin() -> None:
    """Start the server of this process, and of those that it starts. It imports nothing before it is
    asked."""
    if WITHOUT in os.environ:
        os.environ[FOLDER] = os.environ[WITHOUT]
        return
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    source = Path(__file__).with_name("forked_python.py").read_text()
    with contextlib.ExitStack() as stack:
        listeners = []
        for name in ("fresh", "python"):
            program = folder / name
            program.write_text(f"#!{sys.executable} -IS\n{source}")
            program.chmod(0o700)
            listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            listeners[-1].bind(f"{program}.socket")
            listeners[-1].listen(64)
        numbers = [listener.fileno() for listener in listeners]
        paths = [*PATHS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        # As Spark sets it for the processes of its workers.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
        subprocess.Popen(  # ends when this process does, and with it the pipe
            [
                sys.executable,
                Path(__file__).with_name("serve_forks.py"),
                str(folder),
                *map(str, numbers),
            ],
            stdin=subprocess.PIPE,
            env=environment,
            pass_fds=numbers,
        )
    os.environ[FOLDER] = str(folder)


def parents() -> dict[int, int]:
    """Return the parent of each process that is there; that of a fork is whoever started the program
    that asked for it."""
    found, asked = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            found[int(entry.name)] = int(rest.split()[1])
            if name.startswith(NAME):
                asked[int(name.removeprefix(NAME))] = int(entry.name)
    return found | {fork: found[program] for fork, program in asked.items()}


def of_program(pid: int) -> list[int]:
    """Return a program that may have asked for a fork, or the fork, and all that it has started."""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.startswith(NAME):
            pid = int(name.removeprefix(NAME))
    return [pid, *below(pid)]


def below(pid: int) -> list[int]:
    """Return all processes that a process has started, and what these have."""
    above, found = parents(), [pid]
    for one in found:  # grows meanwhile
        found += [each for each, its in above.items() if its == one]
    return found[1:]
