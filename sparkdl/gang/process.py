"""A rank as a process of its own: ``python -m sparkdl.gang.process``, see
:mod:`sparkdl.gang.oversubscribe`.

What it has to do comes from its task, through the standard input, which stays open for as long as the
task lives.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading

from sparkdl.gang.oversubscribe import RunHostedRank
from sparkdl.gang.process_group import let_go_of_folders


def main() -> None:
    """Be a rank, until it or its task ends."""
    part: RunHostedRank = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_task, name="sparkdl-task", daemon=True).start()
    part()


def _end_with_task() -> None:
    """Nothing more is said: reading ends when the task is gone, and so does this process."""
    os.read(0, 1)
    let_go_of_folders(seconds=0)  # at once: it would go on training
    os._exit(1)


if __name__ == "__main__":
    main()
