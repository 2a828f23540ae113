"""Commands that join the ranks of a gang into a ``torch.distributed`` process group.

The ranks find each other through their channels to the driver. If all of them see one private file,
that file is torch's store, and no port is needed. Otherwise rank 0 listens on the address under
which Spark knows its node, on a port that the system chooses, and passes the listening socket
itself to torch's store, so that no port is picked, released and taken again. Gloo and NCCL use the
network interface of that address unless the environment names one. They connect the ranks by TCP,
which neither Spark's authentication nor its encryption covers.

The environment variables that torchrun sets, for the ranks of a gang, because libraries read them.

Accelerate, Lightning and DeepSpeed read ``LOCAL_RANK`` to find the GPU of a process. If it is
missing, they assume a process that trains alone. So the ranks of a node are numbered in the order
of their GPUs, as torch counts them: if they have all GPUs of the node, each finds its own.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import gc
import importlib
import logging
import os
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparkdl.collectives.parameter_server import abandon_all
from sparkdl.errors import SessionError
from sparkdl.gang.channel import listening
from sparkdl.gang.rank_task import Command, RankContext
from sparkdl.process.system import address_call
from sparkdl.slab.root import marked_directory

logger = logging.getLogger("sparkdl")


@dataclass(frozen=True)
class Where:
    """The location of a rank."""

    node: str
    gpu: int | None = None  # torch's number
    slot: str | None = None  # the hardware slot of its GPU
    port: int = 0  # on rank 0: reserved for it


def gpus_of_ranks(ranks: Sequence[Where]) -> set[tuple[str, str]]:
    """Return the GPUs of the ranks."""
    return {(where.node, where.slot) for where in ranks if where.slot is not None}


def check_unshared(ranks: Sequence[Where]) -> None:
    """Check that ranks do not share a GPU if the user has not set their number."""
    on_gpus = sum(where.slot is not None for where in ranks)
    gpus = len(gpus_of_ranks(ranks))
    if gpus < on_gpus:
        raise SessionError(
            f"{on_gpus} ranks, one for each task slot, would share {gpus} GPU{'s' * (gpus > 1)}. Let "
            "Spark assign them: spark.executor.resource.gpu.amount and .discoveryScript say how many "
            "an executor has, spark.task.resource.gpu.amount=1 gives each rank one. ranks= says how "
            'many shall be there all the same; device="cpu" leaves GPUs alone.'
        )


def variables(ranks: Sequence[Where], gang: str) -> list[dict[str, str]]:
    """Return, for each rank, the variables that torchrun would set."""
    nodes = list(dict.fromkeys(where.node for where in ranks))
    size, found = str(len(ranks)), []
    for rank, where in enumerate(ranks):
        beside = [other for other, there in enumerate(ranks) if there.node == where.node]
        beside.sort(key=lambda other: (ranks[other].gpu or 0, other))
        found.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": size,
                "LOCAL_RANK": str(beside.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(beside)),
                "GROUP_RANK": str(nodes.index(where.node)),
                "GROUP_WORLD_SIZE": str(len(nodes)),
                "ROLE_NAME": "default",
                "ROLE_RANK": str(rank),
                "ROLE_WORLD_SIZE": size,
                "MASTER_ADDR": ranks[0].node,
                "MASTER_PORT": str(ranks[0].port),
                "TORCHELASTIC_RUN_ID": gang,
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves at the port, if anyone
            }
        )
    return found


LEFT_AS_THEY_ARE = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""The values that torchrun sets unless the variables are set already."""


def announce(told: Sequence[Mapping[str, str]], member: RankContext) -> None:
    """Set the variables, those of each rank in ``told``, until the rank ends."""
    said = {**LEFT_AS_THEY_ARE, **os.environ}
    say(member.at_end, {**{key: said[key] for key in LEFT_AS_THEY_ARE}, **told[member.rank]})


def tell_of_other_gpu(member: RankContext) -> None:
    """Warn if a library that takes the GPU number ``LOCAL_RANK`` would not take this rank's GPU."""
    gpu, told = member.device.index, os.environ.get("LOCAL_RANK")
    if gpu is not None and str(gpu) != told:
        logger.warning(
            "rank %s computes on GPU %s of its node, and a library that looks at LOCAL_RANK takes %s: "
            "let CUDA_VISIBLE_DEVICES of the executors name the GPUs of this session alone, and use "
            "no more ranks than GPUs.",
            member.rank,
            gpu,
            told,
        )


def say(at_end: contextlib.ExitStack, said: Mapping[str, str]) -> None:
    """Set these variables.

    ``at_end`` restores them, since a worker runs other tasks afterwards.
    """
    before = {key: os.environ.get(key) for key in said}
    at_end.callback(_restore, before)
    os.environ.update(said)


def _restore(before: Mapping[str, str | None]) -> None:
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def keep_port(member: RankContext) -> int:
    """Reserve a port of the node until the rank ends, so that the system assigns it to nobody else.

    The port is bound but nothing listens on it, so whoever is told the number can listen.
    """
    family = socket.getaddrinfo(member.address, 0, type=socket.SOCK_STREAM)[0][0]
    kept = member.at_end.enter_context(socket.socket(family, socket.SOCK_STREAM))
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((member.address, 0))
    port = int(kept.getsockname()[1])
    if sys.platform != "linux":  # on other systems nobody else can use a bound port
        kept.close()
    return port


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables that name the network interface of a group."""
_SLOT = ("pci_domain_id", "pci_bus_id", "pci_device_id")
"""The properties by which NCCL identifies a GPU. They are the same for all parts of one GPU. Some
versions of torch do not provide them."""
Call = Callable[[Command], list[Any]]
"""A function that runs a command on every rank and returns the results in rank order."""


def form_group(call: Call, seconds: float) -> list[Where]:
    """Initialize the default process group on every rank: Gloo, with NCCL for GPU tensors.

    NCCL needs a GPU for each rank. If several ranks share one, or have parts of it, Gloo carries
    everything. A rank waits ``seconds`` for the others, here and in each collective.
    """
    folder = call(offer_folder)[0]
    if all(call(functools.partial(sees, folder))):
        store: Store = os.path.join(folder, "store")
    else:
        store = call(functools.partial(listen, seconds))[0]
    ranks = call(where)
    call(functools.partial(announce, variables(ranks, os.path.basename(folder))))
    alone = len(gpus_of_ranks(ranks)) == len(ranks)
    call(functools.partial(join, store, seconds, "cpu:gloo,cuda:nccl" if alone else "gloo"))
    return ranks


Store = str | tuple[str, int]
"""torch's store: a file, or host and port at which rank 0 serves it."""


def open_store(store: Store, member: RankContext, timeout: datetime.timedelta) -> dist.Store:
    """Return a rank's end of the store."""
    if isinstance(store, str):
        return dist.FileStore(store, member.size)
    served = member.kept.pop("store", None)
    return served or dist.TCPStore(*store, None, False, timeout)


LET_GO_SECONDS = 1.0
"""The time that a rank that ends waits for others."""
_held: list[tuple[int, str]] = []
"""The folders that ranks of this process hold, each after its file descriptor."""


def offer_folder(member: RankContext) -> str:
    """Create, on rank 0, a private folder on its node.

    If a killed rank leaves it behind, it is removed when the next one is created on the node.
    """
    return str(marked_directory(Path(tempfile.gettempdir()))) if member.rank == 0 else ""


def sees(folder: str, member: RankContext) -> bool:
    """Return whether this rank sees the folder. If it does, it holds the folder until it ends.

    The last rank to release the folder removes it, because torch's store writes its file again when
    it is closed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:  # there is no such folder, or its file system has no locks
        return False
    _held.append((descriptor, folder))
    member.at_end.callback(let_go_of_folders)
    return True


def let_go_of_folders(seconds: float = LET_GO_SECONDS) -> None:
    """Release all folders that this process holds.

    Wait for other ranks that end at the same time. A killed rank's hold ends a little after the
    rank is known to be lost.
    """
    with contextlib.suppress(IndexError):  # none is left, or another thread has just taken the last
        while True:
            descriptor, folder = _held.pop()
            until = time.monotonic() + seconds
            while not (last := _is_last(descriptor)) and time.monotonic() < until:
                time.sleep(0.005)
            if last:
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _is_last(descriptor: int) -> bool:
    """Return whether no other rank holds the folder.

    Afterwards this one has no lock, or the only one.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def listen(seconds: float, member: RankContext) -> tuple[str, int] | None:
    """Serve torch's store on rank 0, and return its host and port."""
    if member.rank > 0:
        return None
    door = listening(member.address)
    port = int(door.getsockname()[1])
    member.kept["store"] = dist.TCPStore(
        member.address,
        port,
        None,
        True,
        datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=door.detach(),
    )
    return member.address, port


def where(member: RankContext) -> Where:
    """Return the location of the rank."""
    port = keep_port(member) if member.rank == 0 else 0
    if member.device.type != "cuda":
        return Where(member.address, port=port)
    gpu = torch.cuda.get_device_properties(member.device)
    slot = [str(getattr(gpu, key, gpu.uuid)) for key in _SLOT]
    return Where(member.address, member.device.index, " ".join(slot), port)


def join(store: Store, seconds: float, backend: str, member: RankContext) -> None:
    """Initialize the default process group, until the rank ends.

    The group is not bound to the device. With a bound one, torch creates the groups of a mesh by
    splitting it, which crashes a process that was in another group before (seen with torch 2.13).
    """
    missing = [name for name in INTERFACES if name not in os.environ]  # else the user has named one
    if missing:
        say(member.at_end, dict.fromkeys(missing, interface_of(member.address)))
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(
        backend,
        store=open_store(store, member, timeout),
        rank=member.rank,
        world_size=member.size,
        timeout=timeout,
    )
    member.at_end.push(lambda kind, error, trace: leave(failed=kind is not None))


def leave(failed: bool = False) -> None:
    """Destroy the process group, and first whatever would keep it alive.

    A parameter server that nobody has closed has threads that wait for other ranks.

    A DistributedDataParallel may outlive the function that made it, in a cycle or a traceback. If
    its reducer were the last to hold the group, the garbage collector would wait for Gloo's threads
    during some later task of this worker while it holds the GIL. A thread that frees a tensor needs
    the GIL, so that would be a deadlock. If ``failed``, other ranks may be lost, and pending NCCL
    operations are aborted.
    """
    abandon_all()
    for thing in gc.get_objects():
        if issubclass(type(thing), DistributedDataParallel):
            thing.reducer = thing.logger = None
    if "torch.distributed.tensor" in sys.modules:
        _forget_meshes()
    if not dist.is_initialized():  # a user's function may have destroyed the group
        return
    if failed and "nccl" in dist.get_backend_config():
        with contextlib.suppress(RuntimeError):  # torch's watchdog may have aborted it already
            dist.distributed_c10d._abort_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


_CACHES_OF_MESHES = (
    "debug._clear_sharding_prop_cache",
    "_redistribute.clear_redistribute_planner_cache",
    "_redistribute._gen_transform_infos.cache_clear",
    "_collective_utils.MeshTopoInfo.build_from_mesh.cache_clear",
    "_sharding_prop.ShardingPropagator._propagate_tensor_meta_cached.cache_clear",
)


def _forget_meshes() -> None:
    """Clear torch's caches of operations with DTensors. They hold meshes, and these hold their groups:
    connections, and a thread that polls."""
    for cache in _CACHES_OF_MESHES:
        module, _, clear = cache.partition(".")
        with contextlib.suppress(ImportError, AttributeError):  # another version of torch
            attrgetter(clear)(importlib.import_module(f"torch.distributed.tensor.{module}"))()


def interface_of(address: str) -> str:
    """Return the network interface with this IPv4 address."""
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
    if any(found.startswith("127.") for found in wanted):  # all of 127/8 is on the loopback
        return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    raise ValueError(f"no network interface of this node has the address {address}")
