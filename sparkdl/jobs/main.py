"""The command ``sparkdl``: its subcommands, and how it ends.

Libraries are imported after the arguments are checked: torch and Spark take seconds.
"""

from __future__ import annotations

import io
import os
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
    "config FILE": "a YAML file, see sparkdl conf; of several, the last value of a key counts",
    "print_config": "print the keys with their values, and end",
    "resume FOLDER": "go on from a run folder; with --config from a checkpoint, or latest",
    "dry-run": "check configuration, data, model and sizes on the executors, and train nothing",
    "trials": "run the best three for 30 iterations each, and rank them by that",
    "trust": "let the folder run code of its choice: its pickle, any function that it names",
    "overwrite": "replace what is at --output",
    "argmax": "the number of the highest output: the class",
}
_OPTIONS: dict[str, tuple[str, ...]] = {
    "train": ("config FILE", "print_config", "resume FOLDER", "dry-run"),
    "tune": ("config FILE", "print_config", "resume FOLDER"),
    "plan": ("config FILE", "print_config", "trials"),
    "evaluate": ("trust",),
    "predict": ("overwrite", "argmax", "trust"),
}
"""The options of each command beside its keys; those with a second word take a value."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a subcommand and exit.

    The status is 0, 2 with ``error: ...`` for a mistake of the user, 130 after an interrupt, or 1
    for a fault."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's: it lacks letters
    if (here := os.getcwd()) not in sys.path:  # for modules that a file names
        sys.path.append(here)
    lines: dict[str, str] = {}
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments), lines)
    except (Exception, KeyboardInterrupt) as error:
        status, message = 2, str(error) or None
        if not isinstance(error, UserError) or error.__cause__ is not None:
            from sparkdl.jobs.commands import ended_by

            status, message = ended_by(error)
        if message is None:
            raise
        message = config.with_lines(message, lines)
        message = message.replace("trust=True", "trust=True (here: --trust)")
        print(f"error: {without_credentials(message)}", file=sys.stderr)
        sys.exit(status)
    sys.exit(0)


def _run(arguments: list[str], lines: dict[str, str]) -> None:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "--version"):
        about = [f"  {command:<10}{text}" for command, text in COMMANDS.items()]
        usage = "usage: sparkdl COMMAND ...; sparkdl COMMAND --help lists all keys"
        print(sparkdl.__version__ if name == "--version" else "\n".join([usage, "", *about]))
    elif name not in COMMANDS:
        raise ParameterError(
            f'unknown command "{name}".{nearest(name, COMMANDS)} Known: {", ".join(COMMANDS)}.'
        )
    elif name in ("archive", "report", "session"):
        __main__.main(arguments, "sparkdl")
    elif {"-h", "--help"} & {*rest}:
        _print_help(name)
    elif name == "conf":
        package = Path(sparkdl.__file__).parent
        source = next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())
        folder = rest[0] if rest else "conf"
        shutil.copytree(source, folder, copy_function=_copy, dirs_exist_ok=True)
    else:
        keys, options = config.parse(name, rest, _OPTIONS[name], lines)
        if not options.get("print_config"):
            from sparkdl.jobs import commands
            from sparkdl.spark.failures import query_log_hushed

            with query_log_hushed():
                getattr(commands, name)(keys, options)


def _print_help(name: str) -> None:
    """Print the options and keys of a command."""
    keys = config.defaults_of(name) if name in _OPTIONS else None
    print(f"usage: sparkdl {name} ...: {COMMANDS[name]}")
    for option in _OPTIONS.get(name, ()):
        print(f"  --{option:<16}{_HELP[option]}")
    if keys is not None:
        import yaml

        print("\nKeys, such as --trainer.epochs 5, with their defaults; ??? must be given:\n")
        print(yaml.safe_dump(keys, sort_keys=False))


def _copy(file: str, copy: str) -> None:
    """Copy a file unless it is there, and say so."""
    if Path(copy).exists():
        print(f"{copy} is there already and stays")
    else:
        print(shutil.copy(file, copy))


if __name__ == "__main__":
    main()
