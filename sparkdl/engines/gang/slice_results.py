"""The ranks' results about slices, which the driver brings together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sparkdl.engines.delivery import AT_ONCE_BYTES, Wanted, bring, not_here
from sparkdl.slab.parts import Left
from sparkdl.slab.pool import Reference
from sparkdl.slab.root import SlabConfig


class SliceResults:
    """Calls of the ranks' methods that have a result for each slice."""

    def __init__(self, call: Callable[..., list[Any]], slab: SlabConfig, slices: int) -> None:
        self._call, self._slab, self._slices = call, slab, slices
        self._times_left = 0  # the number of requests whose results may have been left in slabs

    def arrays(self, doing: str, method: str, *arguments: Any) -> np.ndarray:
        """Return the bytes of the arrays that the slices have as results, one after another."""
        found = self._ask(doing, method, *arguments)
        sizes = [one.reference.nbytes if isinstance(one, Left) else one.nbytes for one in found]
        flat = np.empty(sum(sizes), dtype=np.uint8)
        wanted: list[Wanted] = []
        for n, place in enumerate(np.split(flat, np.cumsum(sizes)[:-1])):
            if isinstance(found[n], Left):
                wanted.append((n, found[n].reference, place))
            else:
                place[:] = found[n].view(np.uint8)
        self._bring(doing, wanted)
        return flat

    def values(self, doing: str, method: str, *arguments: Any) -> list[Any]:
        """Return the results in the order of the slices."""
        results = self._ask(doing, method, *arguments)
        for n, result in enumerate(results):
            if isinstance(result, Left):
                data = np.empty(result.reference.nbytes, dtype=np.uint8)
                self._bring(doing, [(n, result.reference, data)])
                results[n] = data.tobytes()
        return results

    def in_order(self, results: Sequence[Mapping[int, Any]]) -> list[Any]:
        """Return the results of all ranks, by slice, in the order of the slices."""
        found = {n: result for some in results for n, result in some.items()}
        return [found[n] for n in range(self._slices)]

    def _ask(self, doing: str, method: str, *arguments: Any) -> list[Any]:
        """Return a method's results in the order of the slices. Large ones are left in slabs."""
        self._times_left += 1
        return self.in_order(self._call(doing, method, *arguments, self._times_left))

    def _bring(self, doing: str, wanted: Sequence[Wanted]) -> None:
        """Fetch the results that ranks have left in slabs."""

        def read(parts: Mapping[int, Reference]) -> list[bytes]:
            told = self._call(doing, "state.read_parts", parts)
            return [some[n] for n in sorted(parts) for some in told if n in some]

        bring(not_here(self._slab, wanted), read, AT_ONCE_BYTES)
