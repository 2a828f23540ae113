"""The command ``sparkdl plan`` for spark-submit, with the same arguments."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a checkout that is not installed

from sparkdl.jobs.main import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
