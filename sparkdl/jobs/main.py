"""The command ``sparkdl``: its subcommands, and how it ends.

Libraries are imported after the arguments are checked: torch and Spark take seconds.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import sparkdl
from sparkdl import __main__
from sparkdl.codec.describe import without_credentials
from sparkdl.errors import ParameterError, UserError, nearest
from sparkdl.jobs import config

COMMANDS = {
    "train": "train a model as a YAML file says",
    "tune": "search for good values as the section tune of the file says",
    "plan": "what an iteration of the training takes by each engine, and trains nothing",
    "evaluate": "loss and metrics of a saved model on labelled data",
    "predict": "predictions of a saved model, as a column",
    "report": "the report of a run or search; several runs are compared: sparkdl report FOLDER ...",
    "session": "which engines can train in a session of Spark, and how fast: sparkdl session --help",
    "archive": "archive Java's classes of a session of Spark, so that later sessions start faster",
    "conf": "write the configurations that come with sparkdl into a folder: sparkdl conf FOLDER",
}
_HELP = {
    "resume": "go on from a run folder; train also from a checkpoint or latest, with --config",
    "dry-run": "check configuration, data, model and sizes on the executors, and train nothing",
    "trials": "run the best three for 30 iterations each, and rank them by that",
    "trust": "let the folder run code of its choice: its pickle, any function that it names",
    "overwrite": "replace what is at --output",
    "argmax": "the number of the highest output: the class",
}
_FLAGS: dict[str, tuple[str, ...]] = {
    "train": ("dry-run",),
    "tune": (),
    "plan": ("trials",),
    "evaluate": ("trust",),
    "predict": ("overwrite", "argmax", "trust"),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a subcommand and exit.

    The status is 0, 2 with ``error: ...`` for a mistake of the user, 130 after an interrupt, or 1
    for a fault."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's: it lacks letters
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(arguments)
    except (Exception, KeyboardInterrupt) as error:
        message: str | None = str(error)
        status = 2
        if not isinstance(error, UserError) or error.__cause__ is not None:
            from sparkdl.jobs.console import ended_by

            status, message = ended_by(error)
        if message is None:
            raise
        if status == 2:
            message = config.with_lines(message, arguments)
        print(f"error: {without_credentials(message)}", file=sys.stderr)
        sys.exit(status)
    sys.exit(0)


def _run(arguments: list[str]) -> None:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "--version"):
        lines = [f"  {command:<10}{text}" for command, text in COMMANDS.items()]
        usage = "usage: sparkdl COMMAND ...; sparkdl COMMAND --help lists all keys"
        print(sparkdl.__version__ if name == "--version" else "\n".join([usage, "", *lines]))
    elif name not in COMMANDS:
        raise ParameterError(
            f'unknown command "{name}".{nearest(name, COMMANDS)} Known: {", ".join(COMMANDS)}.'
        )
    elif name in ("archive", "report", "session"):
        __main__.main(arguments)
    elif name == "conf":
        parser = argparse.ArgumentParser(prog="sparkdl conf", description=COMMANDS[name])
        parser.add_argument("folder", nargs="?", default="conf", type=Path)
        _write_configurations(parser.parse_args(rest).folder)
    else:
        _run_job(name, rest)


def _run_job(name: str, arguments: list[str]) -> None:
    from_file = name in ("train", "tune", "plan")
    kind = config.Config if from_file else config.SAVED[name]
    needed = "--config FILE" if from_file else "--model FOLDER --data PATH"
    usage = f"sparkdl {name} {needed} [--KEY VALUE ...]"
    parser = config.new_parser(
        prog=f"sparkdl {name}", usage=usage, description=COMMANDS[name], parser_mode="omegaconf"
    )
    if from_file:
        parser.add_argument(
            "--config",
            action="config",
            help="a YAML file; conf/digits.yaml (sparkdl conf) explains every key",
        )
        if name != "plan":
            parser.add_argument("--resume", help=_HELP["resume"])
        arguments = config.with_file_of_run(arguments)
    parser.add_class_arguments(kind, None)
    for flag in _FLAGS[name]:
        parser.add_argument(f"--{flag}", action="store_true", help=_HELP[flag])
    from jsonargparse import ArgumentError
    from omegaconf.errors import OmegaConfBaseException

    hints = config.keys_of(kind)
    try:
        parsed = parser.instantiate(parser.parse_args(arguments))
    except (ArgumentError, OmegaConfBaseException) as error:
        raise config.parser_error(error, hints) from None
    checked = [config.config_of(parsed)] if from_file else []
    from sparkdl.jobs import commands
    from sparkdl.spark.failures import query_log_hushed

    with query_log_hushed():
        getattr(commands, name)(*checked, parsed)


def _write_configurations(folder: Path) -> None:
    """Copy the files of ``conf/`` that are not in the folder yet."""
    package = Path(sparkdl.__file__).parent
    source = next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        copy = folder / file.relative_to(source)
        if copy.exists():
            print(f"{copy} is there already and stays")
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
        print(copy)


if __name__ == "__main__":
    main()
