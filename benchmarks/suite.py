"""Every figure beside its baseline, in one run: all these benchmarks, one after another.

    python benchmarks/suite.py [--quick] [--only throughput,memory] [--json FOLDER]

``--quick`` shows in some minutes whether all of them run; without it, half an hour. A benchmark that
fails does not stop those after it; the status is then 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ALL = ("baselines", "throughput", "iteration", "large_model", "end_to_end", "memory", "scaling")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", help="names, with commas between")
    parser.add_argument("--json", metavar="FOLDER", help="also write NAME.json for each into it")
    options = parser.parse_args()
    failed = []
    for name in options.only.split(",") if options.only else ALL:
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py"))]
        command += ["--quick"] if options.quick else []
        if options.json:
            Path(options.json).mkdir(parents=True, exist_ok=True)
            command += ["--json", str(Path(options.json, f"{name}.json"))]
        print(f"## {name}\n", flush=True)
        started = time.perf_counter()
        if subprocess.run(command).returncode:
            failed.append(name)
        print(f"\n({time.perf_counter() - started:.0f} s)\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
