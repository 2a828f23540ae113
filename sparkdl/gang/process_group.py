"""Joining the ranks of a gang into a ``torch.distributed`` process group: commands for them.

The ranks meet through their channels to the driver. Where all of them see one private file, that file
is torch's store and nobody listens for it; else rank 0 listens on the address that Spark knows of its
node, at a port that the system chose, and hands the listening socket itself to torch's store: no port
is picked, let go of and taken again. Gloo and NCCL are told to use the network interface of that
address, unless the environment names one. They connect the ranks by TCP, which neither Spark's
authentication nor its encryption covers.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import gc
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparkdl.gang.environment import Announce, Where, gpus_of_ranks, keep_port, say, variables
from sparkdl.gang.rank_task import Command, RankContext
from sparkdl.process.system import address_call
from sparkdl.slab.root import marked_directory

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables that name the network interface of a group."""
_SLOT = ("pci_domain_id", "pci_bus_id", "pci_device_id")
"""By these NCCL knows a GPU: those of its parts are the same. Not every torch tells them."""
Call = Callable[[Command], list[Any]]
"""Runs a command on every rank; the results in rank order."""


def form_group(call: Call, seconds: float) -> list[Where]:
    """Give every rank the default process group: Gloo, and NCCL for what is on GPUs. Where they are.

    NCCL wants a GPU for each rank; where several share one, or have parts of it, Gloo carries
    everything.
    ``seconds``: how long a rank waits for the others, here and in each collective.
    """
    folder = call(offer_folder)[0]
    if all(call(functools.partial(sees, folder))):
        store: Store = FileStore(os.path.join(folder, "store"))
    else:
        store = NetworkStore(*call(functools.partial(listen, seconds))[0])
    ranks = call(where)
    call(Announce(variables(ranks, os.path.basename(folder))))
    alone = len(gpus_of_ranks(ranks)) == len(ranks)
    call(functools.partial(join, store, seconds, "cpu:gloo,cuda:nccl" if alone else "gloo"))
    return ranks


@dataclass(frozen=True)
class FileStore:
    """Torch's store as a file."""

    path: str

    def open(self, member: RankContext, timeout: datetime.timedelta) -> dist.Store:
        return dist.FileStore(self.path, member.size)


@dataclass(frozen=True)
class NetworkStore:
    """Torch's store as rank 0 serves it."""

    host: str
    port: int

    def open(self, member: RankContext, timeout: datetime.timedelta) -> dist.Store:
        served = member.kept.pop("store", None)
        return served or dist.TCPStore(self.host, self.port, None, False, timeout)


Store = FileStore | NetworkStore


LET_GO_SECONDS = 1.0
"""How long a rank that ends waits for others."""
_held: list[tuple[int, str]] = []
"""The folders that ranks of this process hold, each with its descriptor."""


def offer_folder(member: RankContext) -> str:
    """On rank 0: a private folder of this node. If it is left because a rank was killed, it goes with
    the node's next one."""
    return str(marked_directory(Path(tempfile.gettempdir()))) if member.rank == 0 else ""


def sees(folder: str, member: RankContext) -> bool:
    """Whether the folder is there, seen from this rank, which then holds it until it ends.

    The last to let go of it removes it: torch's store writes its file once more when it is closed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:  # none, or one that knows no locks
        return False
    _held.append((descriptor, folder))
    member.at_end.callback(let_go_of_folders)
    return True


def let_go_of_folders(seconds: float = LET_GO_SECONDS) -> None:
    """Of all that this process holds. Others that end, too, are waited for: one that was killed lets
    go a little after that is known."""
    with contextlib.suppress(IndexError):  # none is left, or another thread has just taken it
        while True:
            descriptor, folder = _held.pop()
            until = time.monotonic() + seconds
            while not (last := _is_last(descriptor)) and time.monotonic() < until:
                time.sleep(0.005)
            if last:
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _is_last(descriptor: int) -> bool:
    """Whether no other rank holds the folder. This one holds it no more, or alone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def listen(seconds: float, member: RankContext) -> tuple[str, int] | None:
    """On rank 0: serve torch's store; at which host and port."""
    if member.rank > 0:
        return None
    family = socket.getaddrinfo(member.address, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((member.address, 0), family=family, backlog=1024)
    port = listening.getsockname()[1]
    member.kept["store"] = dist.TCPStore(
        member.address,
        port,
        None,
        True,
        datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return member.address, port


def where(member: RankContext) -> Where:
    """Where the rank is."""
    port = keep_port(member) if member.rank == 0 else 0
    if member.device.type != "cuda":
        return Where(member.address, port=port)
    gpu = torch.cuda.get_device_properties(member.device)
    slot = [str(getattr(gpu, key, gpu.uuid)) for key in _SLOT]
    return Where(member.address, member.device.index, " ".join(slot), port)


def join(store: Store, seconds: float, backend: str, member: RankContext) -> None:
    """Initialise the default process group, until the rank ends.

    Not bound to the device: torch then makes the groups of a mesh by splitting this one, which ends a
    process that has been in another before (seen with torch 2.13).
    """
    missing = [name for name in INTERFACES if name not in os.environ]  # else the user has named one
    if missing:
        say(member.at_end, dict.fromkeys(missing, interface_of(member.address)))
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(
        backend,
        store=store.open(member, timeout),
        rank=member.rank,
        world_size=member.size,
        timeout=timeout,
    )
    member.at_end.push(lambda kind, error, trace: leave(failed=kind is not None))


def leave(failed: bool = False) -> None:
    """Destroy the process group, and before it what else would hold it. ``failed``: others of it may be
    lost, and what NCCL has begun with them is not waited for.

    A DistributedDataParallel may outlive the function that made it, in a cycle or a traceback. Were its
    reducer the last to hold the group, the collector would wait for Gloo's threads in some later
    task of this worker, with Python's lock in its hand; and a thread that lets go of a tensor wants
    that lock.
    """
    for thing in gc.get_objects():
        if issubclass(type(thing), DistributedDataParallel):
            thing.reducer = thing.logger = None
    if not dist.is_initialized():  # a user's function may have done it
        return
    if failed and "nccl" in dist.get_backend_config():
        with contextlib.suppress(RuntimeError):  # torch's guard may have been quicker
            dist.distributed_c10d._abort_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def interface_of(address: str) -> str:
    """The network interface with this IPv4 address. Raises ValueError where there is none."""
    wanted = {str(info[4][0]) for info in socket.getaddrinfo(address, None, socket.AF_INET)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), address_call(), request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) in wanted:
                return name
    if any(found.startswith("127.") for found in wanted):  # 127.0.1.1, say: all of them are there
        return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    raise ValueError(f"no network interface of this node has the address {address}")
