"""Script: runs that write files or listen, and what they write and listen on meanwhile."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from launch import answer, session, spec
from listening import watching
from torch import nn

import sparkdl


@contextlib.contextmanager
def noting(roots: list[Path]) -> Iterator[dict[str, int]]:
    """Note the mode of all that is in the folders while the block runs, by path."""
    modes: dict[str, int] = {}
    over = threading.Event()

    def look() -> None:
        while True:
            last = over.is_set()
            for root in roots:
                for folder, folders, files in os.walk(root):
                    for name in [*folders, *files]:
                        with contextlib.suppress(OSError):
                            path = os.path.join(folder, name)
                            modes[path] = stat.S_IMODE(os.lstat(path).st_mode)
            if last:
                return
            over.wait(0.05)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield modes
    finally:
        over.set()
        thread.join()


def main() -> None:
    given, here = spec(), Path.cwd()
    places = {name: here / name for name in ("temporary", "slabs", "paths", "working")}
    tempfile.tempdir = None
    os.environ["TMPDIR"] = str(places["temporary"])
    for place in places.values():
        place.mkdir()
    settings = {
        "spark.sparkdl.slab.dir": str(places["slabs"]),
        "spark.python.unix.domain.socket.dir": given["sockets"],
    }
    os.chdir(places["working"])
    paths = places["paths"]
    roots = [*places.values(), Path(given["sockets"])]
    with (
        noting(roots) as modes,
        watching(0.2) as listened,
        session("local[2]", **settings) as spark,
    ):
        rows = [([float(i % 5), float(i % 3)], [float(i % 2)]) for i in range(64)]
        data = spark.createDataFrame(rows, "features array<float>, label array<float>")
        for engine in ("shuffle", "gang"):
            trained = sparkdl.Trainer(
                model=partial(nn.Linear, 2, 1),
                loss=nn.functional.mse_loss,
                optimizer=partial(torch.optim.Adam, lr=0.01),
                engine=engine,
                replicas=2,
                batch_size=16,
                stop=sparkdl.max_iteration(8),
                checkpoint=sparkdl.Checkpoint(paths / f"{engine} run", every=sparkdl.every(4)),
            ).fit(data)
        trained.save(paths / "saved")
        trained.with_module(lambda module: nn.Sequential(module)).save(
            paths / "saved", overwrite=True
        )
        conf = spark.sparkContext._jsc.hadoopConfiguration()
        conf.set("fs.viewfs.mounttable.here.link./paths", paths.as_uri())
        trained.save("viewfs://here/paths/at a uri")
        for partitions in (2, 3):
            sparkdl.predict(
                data, trained, path=paths / "predicted", partitions=partitions, overwrite=True
            )
        stage = sparkdl.ml.TorchRegressor(model=lambda: nn.Linear(2, 1))
        stage.write().overwrite().save(str(paths / "stage"))
    answer(
        {
            "files": {path.removeprefix(f"{here}/"): mode for path, mode in modes.items()},
            "ports": sorted(listened.ports),
            "roles": sorted(listened.roles),
        }
    )


if __name__ == "__main__":
    main()
