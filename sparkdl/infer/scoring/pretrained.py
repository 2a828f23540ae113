"""Models and tokenizers of transformers, from folders that ``save_pretrained`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from sparkdl.errors import ModelError, ParameterError, kind_of
from sparkdl.process.determinism import seeded

CLASSIFIER = "ForSequenceClassification"
"""The end of the names of the classes that classify texts."""


def library() -> Any:
    """Return the package transformers."""
    try:
        import transformers
    except ImportError:
        raise ParameterError(
            "this needs a library that is not installed: pip install transformers (the extra "
            '"transformers").'
        ) from None
    return transformers


def pretrained(folder: Path, head: str | None) -> nn.Module:
    """Return the model of a folder; nothing is downloaded, and no code in the folder is run.

    ``head``: "none", "classes" (it classifies texts), or None for the class that the folder names.
    """
    transformers = library()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise _unreadable(folder, error) from error
    named = next(iter(config.architectures or ()), "")
    if head == "classes" and not named.endswith(CLASSIFIER):
        raise ModelError(
            f'the folder "{folder}" has a {named or config.model_type}, which has no head that '
            f"classifies: give one of a model ...{CLASSIFIER}, as fine-tuning leaves it."
        )
    kind = transformers.AutoModel if head == "none" else getattr(transformers, named, None)
    if kind is None:
        raise ModelError(
            f'the folder "{folder}" names the class {named!r}, which this transformers '
            f"({transformers.__version__}) does not have: load the model, and pass it."
        )
    try:
        with seeded(0):  # a pooler that the folder lacks
            return kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise _unreadable(folder, error) from error


def tokenizer_of(given: Any, folder: Path | None, where: str) -> Any:
    """Return ``given``, a tokenizer or the path of one; if None, the tokenizer in ``folder``."""
    if given is not None and not isinstance(given, (str, Path)):
        if not callable(given) and not hasattr(given, "encode_batch"):
            raise ParameterError(
                f"tokenizer is {kind_of(given)}: give a tokenizer of transformers or tokenizers, or "
                "the path of its folder."
            )
        return given
    place = Path(given) if given is not None else folder
    if place is None:
        raise ParameterError(
            f'column "{where}" is text: give the tokenizer of the model, tokenizer=... (a folder of '
            "save_pretrained may have both)."
        )
    if not place.is_dir():
        raise ParameterError(f'tokenizer: there is no folder "{place}" on the driver.')
    try:
        found = library().AutoTokenizer.from_pretrained(place, local_files_only=True)
        files = getattr(found, "vocab_files_names", {}).values()
        if files and not any((place / name).exists() for name in files):  # it knows no word
            raise FileNotFoundError(f"there is no {' or '.join(files)}")
        return found
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ParameterError(
            f'the folder "{place}" has no tokenizer that can be read ({first}): give tokenizer=..., or '
            "write it there with tokenizer.save_pretrained."
        ) from error


def longest(module: nn.Module, tokenizer: Any) -> int | None:
    """Return the most tokens that model and tokenizer name as their limit, or None."""
    config = getattr(module, "config", None)
    limits = [
        getattr(config, "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),
    ]
    if limits[0] and getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert"):
        limits[0] -= 2  # its first positions stand for padding
    known = [int(limit) for limit in limits if limit and 0 < limit < 1 << 20]
    return min(known, default=None)


def _unreadable(folder: Path, error: Exception) -> ModelError:
    first = str(error).strip().partition("\n")[0]
    return ModelError(f'the folder "{folder}" has no model that can be read: {first}')
