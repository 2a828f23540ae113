"""The tree of all exceptions that sparkdl raises on purpose.

A *user error* (:class:`UserError` and its subclasses) is a mistake in the data, the model or a
parameter. It is found before the first training task, names the place and the remedy, and is never
retried. Every other error is a *fault* of the run, which Spark retries first.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import itertools
import os
import re
import reprlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

Class = TypeVar("Class")
_VOWEL_SOUND = re.compile("[aeioAEIO]|[FHLMNRSX][A-Z]|ndarray")
"""Matches the names of types that begin with a vowel sound: int, LRScheduler, ndarray."""
_OF_PANDAS = {"pandas": "spark.createDataFrame(df)", "pyspark.pandas": "df.to_spark()"}
"""The expression that converts a DataFrame ``df`` of each of these libraries to a Spark DataFrame."""
NEEDS_SPARK_4 = (
    "Over Spark Connect sparkdl needs Spark 4.0 or newer, in client and server: start a classic "
    "session, sparkdl.session(master), or spark-submit your script."
)


_NOT_THE_USERS = re.compile(
    "|".join(map(re.escape, (os.path.dirname(__file__), sysconfig.get_path("stdlib"))))
    + r"|<string>|<frozen |.*[/\\](site-packages|dist-packages)[/\\]"
)
"""Matches files whose code is not the user's: of this package, of Python, and of what pip installs."""
_LIBRARIES = ("torch", "pyspark", "py4j")
"""Libraries that may lie elsewhere: in Spark's own folder, where a ``.pth`` or PYTHONPATH leads."""


class SparkdlError(Exception):
    """The root: ``except sparkdl.SparkdlError`` catches all that sparkdl raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: the message below the frames of the user's code.

        IPython calls it. ``traceback.print_exception(sys.last_value)`` shows all frames.
        """
        told = traceback.TracebackException.from_exception(self)
        _keep_frames_of_user(told)
        return "".join(told.format()).splitlines()


def frames_of_user(error: BaseException) -> str:
    """Return the traceback of an error and of its causes in the user's code; "" if there is none."""
    told = traceback.TracebackException.from_exception(error)
    return "".join(told.format()).rstrip() if _keep_frames_of_user(told) else ""


def _keep_frames_of_user(told: traceback.TracebackException) -> bool:
    """Remove all other frames, and causes that have none left; return whether any frame is left."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    homes = tuple(os.path.join(os.path.dirname(file), "") for file in files if file)
    own = [
        frame
        for frame in told.stack
        if not (_NOT_THE_USERS.match(frame.filename) or frame.filename.startswith(homes))
    ]
    told.stack = traceback.StackSummary.from_list(own)
    if told.__cause__ is not None and not _keep_frames_of_user(told.__cause__):
        told.__cause__ = None
    if told.__context__ is not None and not _keep_frames_of_user(told.__context__):
        told.__context__ = None
    return bool(own) or told.__cause__ is not None


class UserError(SparkdlError, ValueError):
    """A mistake in what the user passed; the message says what is wrong, where, and what to do."""


class ParameterError(UserError):
    """A parameter of the trainer or of a job, or a setting, has a value that cannot work."""


class ArgumentError(ParameterError, TypeError):
    """A class has no such argument: a TypeError too, as Python's own is."""


class DataError(UserError):
    """A column, a row or a sample cannot become a tensor."""


class ModelError(UserError):
    """The model, the loss or the optimizer cannot be used."""


class SessionError(UserError):
    """The Spark session cannot do this (one of Spark Connect, say), or the master is not valid."""


class TrustError(UserError):
    """A saved model that was not trusted holds a pickle, or names a function nobody vouched for."""


class TrainingError(SparkdlError, RuntimeError):
    """An iteration failed for good, after Spark's retries; the message says where and why."""


class StateLostError(TrainingError):
    """The state of a slice, or a rank of a gang, is lost: its node died, or its slab was deleted."""


class StalledError(TrainingError):
    """Nothing happened in a job for ``spark.sparkdl.timeout.seconds``; the message names the tasks."""


class CheckpointError(SparkdlError, RuntimeError):
    """A checkpoint cannot be written, found or read; the message says which path and why."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is incomplete, changed on disk or not sparkdl's; an earlier one may be whole."""


class StaleReferenceError(SparkdlError, RuntimeError):
    """A slab reference names a write that is gone, as in a late attempt of a past iteration."""


class SlabFullError(TrainingError, OSError):
    """No slab directory of this node has room, or the directory cannot be created."""


def optional_library(name: str, what: str, extra: str, package: str = "") -> Any:
    """Return the module called ``name``, which ``what`` needs; pip may know it as ``package``."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ParameterError(
            f"{what} needs a library that is not installed: pip install {package or name} (the extra "
            f'"{extra}").'
        ) from None


def kind_of(value: object) -> str:
    """Return the type of ``value`` with its article, for a sentence: "an int", "a str", "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if _VOWEL_SOUND.match(name) else 'a'} {name}"


LONGEST = 200
"""The most characters of a value in a message."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class _Shown(reprlib.Repr):
    """The representation of values in messages: short, on one line, and without addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = LONGEST
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Return a mapping in its own order; :mod:`reprlib` sorts it."""
        if level <= 0:
            return "{...}"
        some = itertools.islice(x.items(), self.maxdict)
        pairs = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in some]
        return "{" + ", ".join([*pairs, *["..."] * (len(x) > self.maxdict)]) + "}"

    def repr_instance(self, x: object, level: int) -> str:
        """Return what Python writes for an object, or its type if that is long."""
        try:
            text = _ADDRESS.sub("", repr(x))
        except Exception:
            text = "\n"
        return text if len(text) <= LONGEST and "\n" not in text else f"<{type(x).__name__} object>"


_shown = _Shown()


def shown(value: object) -> str:
    """Return a user's value for a message: as Python writes it, but short and on one line.

    Long text and lists are cut. A module, an optimizer or a table becomes ``<Linear object>``.
    """
    text = _shown.repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def in_quotes(value: object) -> str:
    """Return text in double quotes, and any other value as :func:`shown`, for an argument of words."""
    text = shown(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and "\\" not in text else text


def text_for_number(make: object) -> str:
    """Return the problem of a partial's keyword that is the text of a number, or an empty string."""
    for name, value in getattr(make, "keywords", {}).items():
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return f'{name} is the text "{value}": give a number, {name}={float(value):g}.'
    return ""


def wrong_data(method: str, data: object, wanted: str, remedy: str = "") -> DataError:
    """Return the error for a ``data`` argument of the wrong type; one of pandas has its own remedy."""
    kind = type(data)
    library = kind.__module__.rpartition(".core.")[0] or kind.__module__.rpartition(".")[0]
    if kind.__name__ == "DataFrame" and library in _OF_PANDAS:
        to = "" if "DataFrame" in wanted else " to transform"
        remedy = f"Pass {_OF_PANDAS[library]}{to}."
    elif kind.__name__ == "DataFrame" and library == "pyspark.sql.connect":
        remedy = NEEDS_SPARK_4  # there it is a DataFrame
    found = f"{kind.__module__}.{kind.__qualname__}"
    return DataError(f"{method} takes {wanted}, not {found}. {remedy}".rstrip())


@contextlib.contextmanager
def pickling(what: str, remedy: str, kind: type[UserError] | None = None) -> Iterator[None]:
    """Raise an error of a ``kind``, ParameterError if None, for what cannot be pickled in the block."""
    try:
        yield
    except Exception as error:
        raise (kind or ParameterError)(cannot_travel(what, error, remedy)) from None


def cannot_travel(what: str, error: Exception, remedy: str) -> str:
    """Return the message for a user's object that pickle cannot send to the executors."""
    return (
        f"{what} cannot be pickled, so it cannot travel to the executors "
        f"({type(error).__name__}: {error}). {remedy}"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, without its full stop; one that is long is cut."""
    line = str(error).strip().partition("\n")[0]
    if len(line) > LONGEST:  # torch adds pages about its backends
        line = line.partition(". ")[0][:LONGEST]
    return line.rstrip(". ")


def in_short(error: BaseException) -> str:
    """Return the kind of an error and its first line."""
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 iteration", "1,200 iterations"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``' Did you mean "label"?'`` if a known name begins with ``name`` or is similar.

    Return an empty string if there is no such name.
    """
    names = list(known)
    begun = sorted((k for k in names if len(name) > 2 and k.startswith(name)), key=len)
    close = begun or difflib.get_close_matches(name, names, n=1)
    return f' Did you mean "{close[0]}"?' if close else ""


_MEANT = (
    ("maxEpochs={}", "epochs numepochs nepochs"),
    ("stop=sparkdl.max_epoch({})", "epochs maxepochs numepochs nepochs"),
    ("stop=sparkdl.max_iteration({})", "iterations maxiterations maxsteps numsteps steps"),
    ('stop=sparkdl.max_epoch(10) | sparkdl.plateau("loss", 3)', "earlystopping patience"),
    ("every=sparkdl.every({})", "everyiterations everysteps savesteps frequency"),
    ("learningRate={}", "lr"),
    ("optimizer=partial(torch.optim.Adam, lr={})", "lr learningrate"),
    (
        "validation=sparkdl.Validation(data, metrics=[...])",
        "metric metrics evalmetrics validationdata valdata evalset evaldata",
    ),
    ('trainerArgs={{"validation": {{"metrics": [...]}}}}', "metric metrics evalmetrics"),
    ("batch_size={}", "bs globalbatchsize trainbatchsize"),
    ("batchSize={}", "bs globalbatchsize trainbatchsize"),
    ("replicas={}", "workers numworkers numreplicas worldsize numprocesses nprocs"),
    ("loss={}", "criterion lossfn lossfunction objective"),
    ("model={}", "net network module"),
    ("optimizer={}", "optim opt"),
    ("schedule={}", "scheduler lrscheduler"),
    ("accumulate={}", "gradientaccumulationsteps accumulategradbatches accumulationsteps"),
    ("clip_norm={}", "maxgradnorm gradclip gradientclipval clipgradnorm"),
    ("precision={}", "mixedprecision amp dtype"),
    ("features={}", "x inputs inputcols featurescol featurecols"),
    ("featuresCol={}", "x inputs inputcols featurecols"),
    ("label={}", "y target targets labels labelcol"),
    ("labelCol={}", "y target targets labels"),
    ("weight={}", "sampleweight weightcol"),
    ("checkpoint=sparkdl.Checkpoint({})", "checkpointdir checkpointpath ckptpath"),
    ("seed={}", "randomstate randomseed"),
    (
        "replicas=2 for two GPUs: each task takes the one that Spark assigned to it, else the CPU",
        "device devices accelerator gpu gpus numgpus usegpu",
    ),
    (
        "columns={{...}}, how a column becomes a tensor, or augment=, a function of a sample",
        "collate collatefn transform transforms preprocess",
    ),
)
"""The arguments that names of other libraries, without case and underscores, mean; a row counts where a
class has its argument."""


def unknown_argument(who: str, name: str, value: object, known: Sequence[str]) -> str:
    """Return the message about an argument that ``who`` does not have."""
    plain = name.replace("_", "").lower()
    alike = [one for one in known if one.replace("_", "").lower() == plain]
    meant = [remedy for remedy, words in _MEANT if plain in words.split()]
    meant = [remedy for remedy in meant if remedy.partition("=")[0] in known]
    if alike:
        hint = f' Did you mean "{alike[0]}"?'
    elif meant:
        hint = f" Give {meant[0].format(shown(value))}."
    else:
        hint = nearest(name, known)
    if not hint and len(known) <= MOST_ARGUMENTS:
        hint = f" It takes {', '.join(known) or 'none'}."
    return f'{who} has no argument "{name}".{hint}'


MOST_ARGUMENTS = 12
"""The most arguments that a message lists."""


def known_arguments(kind: type[Class]) -> type[Class]:
    """Let the constructor of a class name the argument that is meant by one that it does not have.

    It raises :class:`ArgumentError` then; a decorator, above that of a dataclass.
    """
    init = kind.__init__  # type: ignore[misc]
    code = inspect.unwrap(init).__code__
    known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise ArgumentError(unknown_argument(kind.__name__, name, kwargs[name], known))
        init(self, *args, **kwargs)

    kind.__init__ = checked  # type: ignore[method-assign, misc]
    return kind


def raise_all(kind: type[UserError], problems: Sequence[str]) -> None:
    """Raise one error of type ``kind`` that lists all ``problems``; return if there are none."""
    if len(problems) == 1:
        raise kind(problems[0])
    if problems:
        raise kind("\n".join([f"{len(problems)} problems:", *(f"  - {p}" for p in problems)]))
