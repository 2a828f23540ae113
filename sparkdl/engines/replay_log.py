"""A compact log of the loop's requests to an engine, from which they can be repeated."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from sparkdl.replica.iteration import Decisions, Iteration

Hyperparameters: TypeAlias = tuple[Mapping[str, Any], ...] | None
_Form: TypeAlias = tuple[tuple[tuple[str, int | None], ...], ...]
"""Per parameter group, its keys, each with the tuple's length if the value is a tuple of numbers."""


class ReplayLog:
    """A log of iterations and of requests to keep the best weights.

    An entry takes some 30 bytes, and as many again where a schedule changes a hyperparameter. It
    includes what was decided on the iteration that was committed, 8 bytes a decision, so that what is
    repeated has the same bits.
    """

    def __init__(self) -> None:
        self._numbers = array("q")  # index, epoch, batch; -1, -1, -1 for keeping the best
        self._scales = array("d")
        self._histograms = bytearray()
        self._decided: dict[str, array[int]] = {}
        self._hyperparameters = _Values()

    def __len__(self) -> int:
        return len(self._scales)

    def append(self, asked: Iteration | None, decisions: Decisions | None = None) -> None:
        """Append an iteration, or None for a request to keep the best weights."""
        if asked is not None:
            self._hyperparameters.append(len(self), asked.hyperparameters)
        self._numbers.extend((asked.index, asked.epoch, asked.batch) if asked else (-1, -1, -1))
        self._scales.append(asked.loss_scale if asked else 0.0)
        self._histograms.append(asked.histograms if asked else False)
        decided = decisions or {}
        for name in decided:
            if name not in self._decided:
                self._decided[name] = array("q", [0]) * (len(self) - 1)
        for name, column in self._decided.items():
            column.append(decided.get(name, 0))

    def since(self, start: int) -> Iterator[Iteration | None]:
        """Yield the entries from number ``start`` on, None for a request to keep the best weights."""
        for n in range(start, len(self)):
            index, epoch, batch = self._numbers[3 * n : 3 * n + 3]
            text = f"sparkdl: epoch {epoch + 1} · iteration {index + 1} · again"
            scale, histograms = self._scales[n], bool(self._histograms[n])
            values = self._hyperparameters.at(n) if index >= 0 else None
            iteration = Iteration(
                index=index,
                epoch=epoch,
                batch=batch,
                hyperparameters=values,
                description=text,
                loss_scale=scale,
                histograms=histograms,
                decisions={name: found[n] for name, found in self._decided.items() if found[n]},
            )
            yield None if index < 0 else iteration

    @property
    def iterations(self) -> int:
        """Return the number of iterations done, including those before this run."""
        return max(self._numbers[-6::3], default=-1) + 1


class _Values:
    """The hyperparameters of each entry, stored only where they differ from the entry before.

    Numbers lie in an array; hyperparameters that include any other type are stored as they are.
    """

    def __init__(self) -> None:
        self._entries = array("q")
        self._forms = array("q")  # indices into _known; -1: the values are in _others
        self._starts = array("q")
        self._numbers = array("d")
        self._known: list[_Form] = []
        self._places: dict[_Form, int] = {}
        self._others: dict[int, Hyperparameters] = {}
        self._last: Hyperparameters = None

    def append(self, entry: int, values: Hyperparameters) -> None:
        if values == self._last:
            return
        self._last = values
        self._entries.append(entry)
        self._starts.append(len(self._numbers))
        form = None if values is None else _form_of(values)
        if values is None or form is None:
            self._forms.append(-1)
            self._others[entry] = values
            return
        if form not in self._places:
            self._places[form] = len(self._known)
            self._known.append(form)
        self._forms.append(self._places[form])
        for value in (value for group in values for value in group.values()):
            self._numbers.extend(value if isinstance(value, tuple) else (value,))

    def at(self, entry: int) -> Hyperparameters:
        place = bisect.bisect_right(self._entries, entry) - 1
        if place < 0:
            return None
        if self._forms[place] < 0:
            return self._others[self._entries[place]]
        position, groups = self._starts[place], []
        for keys in self._known[self._forms[place]]:
            values: dict[str, Any] = {}
            for name, length in keys:
                found = self._numbers[position : position + (length or 1)]
                values[name] = found[0] if length is None else tuple(found)
                position += length or 1
            groups.append(values)
        return tuple(groups)


def _form_of(values: tuple[Mapping[str, Any], ...]) -> _Form | None:
    """Return the form of ``values``; None if a value is neither a float nor a tuple of floats."""
    form = []
    for group in values:
        keys: list[tuple[str, int | None]] = []
        for name, value in group.items():
            whole = value if type(value) is tuple and value else (value,)
            if not all(type(one) is float for one in whole):
                return None
            keys.append((name, len(value) if whole is value else None))
        form.append(tuple(keys))
    return tuple(form)
