"""The archive of Java's classes of a Spark session, which makes the JVM of the next ones start faster.

``python -m sparkdl archive`` makes it, in the user's cache directory. Loading and verifying classes is
a third of what the JVM of a short session does; from an archive it maps them. Java takes one only
where the class path is the one it was made for, up to links, and begins with no directory that has
files in it, as Spark's configuration directory does: so the JVM gets these files by their names. An
archive that does not fit is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

SWITCH = "SPARKDL_CLASSES"
"""The variable of the environment that, set to "off", refuses the archive."""
_DEFAULTS, _LOGGING = "spark-defaults.conf", "log4j2.properties"
_LAUNCH = ("SPARK_CONF_DIR", "SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS")
NOWHERE = os.path.join(os.path.dirname(__file__), "no-configuration")
"""A configuration directory that is not there."""


def spark_home() -> Path:
    """Return the directory of the Spark that PySpark would start."""
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home())


def java() -> str | None:
    """Return the path of the Java that Spark would start, if there is one."""
    home = os.environ.get("JAVA_HOME")
    return os.path.join(home, "bin", "java") if home else shutil.which("java")


def archive_path(spark: Path) -> Path | None:
    """Return the place of the archive of a Spark and the present Java; None without Java."""
    program, jars = java(), spark.resolve() / "jars"
    if program is None or not jars.is_dir():
        return None
    release = Path(os.path.realpath(program)).parents[1] / "release"
    about = [
        str(jars),
        release.read_text(encoding="utf-8") if release.is_file() else os.path.realpath(program),
    ]
    with os.scandir(jars) as entries:
        found = sorted((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in entries)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparkdl"
    place, whole = (_digest(text) for text in (about[0], repr((about, found))))
    return cache / f"classes-{place}-{whole}.jsa"  # the first part: others are of its past


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def found(spark: Path | None = None) -> Path | None:
    """Return the archive that a session would use, if it was made and is not refused."""
    if os.environ.get(SWITCH, "").lower() == "off":
        return None
    with contextlib.suppress(OSError, RuntimeError):  # no home directory, say
        path = archive_path(spark or spark_home())
        if path is not None and path.stat().st_uid in (0, os.getuid()):  # nobody else's
            return path
    return None


def options_with(path: Path) -> list[str]:
    """Return Java's options that use an archive, without a word where it does not fit."""
    return [f"-XX:SharedArchiveFile={path}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]


@contextlib.contextmanager
def used(master: str | None) -> Iterator[None]:
    """Make a JVM that is started inside of the block use the archive, if there is one that it may use.

    Where the configuration directory has other files than Spark's defaults and the logging, where
    ``PYSPARK_SUBMIT_ARGS`` begins the JVM in a way of its own, or where a cluster manager wants the
    directory itself, nothing changes.
    """
    submitted = "PYSPARK_SUBMIT_ARGS" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    path = None if submitted or "SharedArchiveFile" in options else found()
    if path is None:
        yield
        return
    folder = Path(os.environ.get("SPARK_CONF_DIR") or spark_home() / "conf")
    files = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
    known = {_DEFAULTS, _LOGGING} & files
    master = master or dict(pairs_in(folder / _DEFAULTS)).get("spark.master", "local")
    # in another cluster processes read the directory itself
    runs_here = master.startswith(("local", "spark://"))
    if not runs_here or any(not name.endswith(".template") for name in files - known):
        yield
        return
    java_options, arguments = options_with(path), ["pyspark-shell"]
    if _LOGGING in known:
        java_options.append(f"-Dlog4j2.configurationFile={(folder / _LOGGING).resolve().as_uri()}")
    if _DEFAULTS in known:
        arguments = ["--properties-file", str(folder / _DEFAULTS), *arguments]
    with _launching(java_options, arguments):
        yield


@contextlib.contextmanager
def recorded(draft: Path) -> Iterator[None]:
    """Make a JVM that is started inside of the block write its classes into a file when it ends."""
    with _launching(
        [f"-XX:ArchiveClassesAtExit={draft}", "-Xlog:cds=error", "-Xlog:cds+dynamic=error"],
        ["pyspark-shell"],
    ):
        yield


@contextlib.contextmanager
def _launching(java_options: list[str], arguments: list[str]) -> Iterator[None]:
    """Start JVMs inside of the block with these options, and without a configuration directory."""
    before = {name: os.environ.get(name) for name in _LAUNCH}
    options = [before["SPARK_SUBMIT_OPTS"] or "", shlex.join(java_options)]
    os.environ["SPARK_CONF_DIR"] = NOWHERE
    os.environ["SPARK_SUBMIT_OPTS"] = " ".join(filter(None, options))
    os.environ["PYSPARK_SUBMIT_ARGS"] = shlex.join(arguments)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def pairs_in(defaults: Path) -> Iterator[tuple[str, str]]:
    """Yield the keys and values in a file of Spark's defaults, if there is one."""
    if defaults.is_file():
        for line in defaults.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.strip().replace("=", " ", 1).partition(" ")
            yield key, value.strip()
