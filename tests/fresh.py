"""Programs in processes of their own that need not import torch: each is a fork of one that has."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODULES = ("torch", "numpy", "pandas", "pyarrow", "pyspark")
"""What is imported beforehand: nothing of sparkdl's."""


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
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{name}" for name in ("stdout", "stderr")]
        folder_of = str(cwd or Path.cwd())
        asked = [code, list(arguments), folder_of, {**os.environ, **environment}, files]
        print(json.dumps(asked), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        output = [Path(file).read_text() for file in files]
    return subprocess.CompletedProcess([code, *arguments], status, *output)


@functools.cache
def _server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def main() -> None:
    for module in MODULES:
        __import__(module)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            become(*json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def become(
    code: str, arguments: list[str], cwd: str, environment: dict[str, str], files: list[str]
) -> None:
    for number, path in enumerate(("/dev/null", *files)):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["-c", *arguments]
    sys.path[0] = cwd  # of the folder of this file
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
