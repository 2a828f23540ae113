"""The program of a rank that is a process of its own: ``python -m sparkdl.gang.process``.

Its task sends the instructions through standard input, which stays open as long as the task lives. See
:mod:`sparkdl.gang.oversubscribe`.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading

from sparkdl.gang.oversubscribe import run_hosted_rank
from sparkdl.gang.process_group import let_go_of_folders


def main() -> None:
    """Run as a rank until the rank or its task ends."""
    part = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_task, name="sparkdl-task", daemon=True).start()
    run_hosted_rank(*part)


def _end_with_task() -> None:
    """Exit when the task is gone, which ends the read: the task sends nothing more."""
    os.read(0, 1)
    let_go_of_folders(seconds=0)  # without waiting, because the rank still trains
    os._exit(1)


if __name__ == "__main__":
    main()
