"""Notes: short texts between ranks, so that they can tell a mistake before they wait for each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sparkdl.errors import ParameterError

LENGTH = 512
"""Bytes of every note. Of fixed size, so that a note always arrives, whatever the ranks disagree on."""


def write(text: str, device: torch.device) -> torch.Tensor:
    """A note as bytes. ParameterError: it is too long."""
    data = text.encode()
    if len(data) > LENGTH:
        raise ParameterError(f"This has too many dimensions to be described: {text[:80]} ...")
    return torch.frombuffer(bytearray(data.ljust(LENGTH)), dtype=torch.uint8).to(device)


def read(note: torch.Tensor) -> str:
    """The text of a note."""
    return bytes(note.tolist()).decode().rstrip()


def compare(group: dist.ProcessGroup, call: str, rows: int, device: torch.device) -> list[int]:
    """The ``rows`` of all ranks, which all tell the same ``call``.

    ParameterError, the same one on every rank: they do not; says who calls what.
    """
    mine = write(f"{rows} {call}", device)
    notes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(notes, mine, group=group)
    found = [read(note).partition(" ") for note in notes]
    calls: dict[str, list[int]] = {}
    for rank, (_, _, its) in enumerate(found):
        calls.setdefault(its, []).append(rank)
    if len(calls) > 1:
        lines = (f"  {_named(ranks)}: {its}" for its, ranks in calls.items())
        raise ParameterError("\n".join(["The ranks do not call the same collective:", *lines]))
    return [int(its) for its, _, _ in found]


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
