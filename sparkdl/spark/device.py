"""The choice of a task's GPU, from Spark's assignment and the devices that torch sees.

Spark passes on the output of the discovery script: numbers as ``nvidia-smi`` counts, or names of
whole GPUs ("GPU-...") or parts of one ("MIG-..."). Torch counts the devices in
``CUDA_VISIBLE_DEVICES``. So

* an address that is listed in the variable is the device at that position;
* a name that is not listed is looked up among the names of the devices that torch sees;
* a number that is not listed counts the devices that the variable leaves visible (e.g. inside a
  container);
* a process sees only one part of a GPU, the one that the variable names when CUDA starts: a process
  in which CUDA has not started is given the assigned part.

A check of a session's GPUs before a fit reads its data.

Each replica runs in its own process, and each process should have its own GPU, because every
process keeps a copy of the model in GPU memory. Spark takes care of that if it knows the number of
GPUs. In ``local[...]`` it cannot, so there are as many replicas as GPUs.
"""

from __future__ import annotations

import logging
import os
import pickle
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pyspark import SparkContext, TaskContext

from sparkdl.errors import SessionError
from sparkdl.spark.executors import Executor, executor_awaited, executors, task_per_executor
from sparkdl.spark.frames import collect_and_forget, is_local, map_frames, stage_name

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
Gpu = int | str
"""A device, by torch's number, or a part of a GPU, by its name."""


def choose_gpus(
    addresses: Sequence[str], visible: str | None, count: int, names: Callable[[], Sequence[str]]
) -> list[Gpu]:
    """Return the devices that ``addresses`` denote, among ``count`` that torch sees."""
    return [_choose(address.strip(), visible, count, names) for address in addresses]


def _choose(
    address: str, visible: str | None, count: int, names: Callable[[], Sequence[str]]
) -> Gpu:
    if address.startswith("MIG-"):
        return address
    entries = [] if visible is None else [entry.strip() for entry in visible.split(",")]
    place = _find(address, entries)
    if place is None and address.isdigit():
        place = int(address)
    elif place is None:
        place = _find(address, names())
    if place is None or place >= count:
        value = "not set" if visible is None else f'"{visible}"'
        raise SessionError(
            f'Spark assigned the GPU "{address}" to this task, but it is not one of the {count} '
            f"that torch sees ({VISIBLE} is {value}): let the discovery script print what "
            "nvidia-smi --query-gpu=index prints (or uuid), and let the variable name all of these "
            "or leave it out."
        )
    return place


def _find(address: str, known: Sequence[str]) -> int | None:
    """Return the index of ``address`` in ``known``; names may be abbreviated and lack their prefix."""
    if address.isdigit():
        return known.index(address) if address in known else None
    short = address.removeprefix("GPU-")
    for place, name in enumerate(known):
        other = name.removeprefix("GPU-")
        if other and not other.isdigit() and (short.startswith(other) or other.startswith(short)):
            return place
    return None


def gpus_of(addresses: Sequence[str]) -> list[Gpu]:
    """Return the devices of the addresses that Spark assigned; none if all GPUs are hidden.

    The executors' environment hides them, see :func:`hidden`.
    """
    if hidden(os.environ.get(VISIBLE)):
        return []
    before = os.environ.get(VISIBLE)
    if not torch.cuda.is_initialized():
        os.environ.setdefault(ORDER, "PCI_BUS_ID")  # the order of nvidia-smi and Spark's script
        if addresses[0].startswith("MIG-"):  # set before torch looks for devices
            os.environ[VISIBLE] = addresses[0]
    if not torch.cuda.is_available():
        raise SessionError(
            f"Spark assigned the GPU {addresses[0]!r} to this task, but torch sees none: "
            f"{Sight.here().reason} To compute on the CPU, hide the GPUs from the executors: "
            f"{VISIBLE}= (empty) in their environment."
        )
    return choose_gpus(addresses, before, torch.cuda.device_count(), _names)


def use_gpu(gpu: Gpu) -> torch.device:
    """Make ``gpu`` torch's current device, and return it."""
    if isinstance(gpu, str):
        if torch.cuda.is_initialized() and os.environ.get(VISIBLE) != gpu:
            raise SessionError(
                f"Spark assigned {gpu} to this task, whose Python process computes on "
                f"{os.environ.get(VISIBLE)} already, but a process can use only one part of a GPU: "
                "set spark.python.worker.reuse=false, or let each executor have one part and run "
                "one task."
            )
        os.environ[VISIBLE] = gpu
        gpu = 0
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return device


def hidden(visible: str | None) -> bool:
    """Return whether the variable is set and leaves no GPU: it is empty or starts with -1."""
    return visible is not None and visible.split(",")[0].strip() in ("", "-1")


def _names() -> list[str]:
    """Return the names of the GPUs that torch sees."""
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]


@dataclass(frozen=True)
class Sight:
    """The facts that decide whether torch sees a GPU."""

    built: bool
    visible: str | None  # CUDA_VISIBLE_DEVICES; None if it is not set
    forked: bool  # CUDA had started in the process that this one was forked from
    address_space: int | None  # its limit in bytes
    driver: bool
    said: str  # the first line of torch's error on starting CUDA; or empty

    @staticmethod
    def here() -> Sight:
        """Return the facts for this process; this starts CUDA."""
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        said = ""
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            said = str(error).strip().partition("\n")[0]
        return Sight(
            torch.version.cuda is not None or torch.version.hip is not None,
            os.environ.get(VISIBLE),
            torch.cuda._is_in_bad_fork(),
            None if soft == resource.RLIM_INFINITY else soft,
            Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists(),
            said,
        )

    @property
    def reason(self) -> str:
        """Return why torch sees no GPU, and how to change that."""
        if not self.built:
            return (
                f"torch {torch.__version__} of the executors' Python is built without CUDA. "
                "Install a build with CUDA there."
            )
        if self.forked:
            return (
                "CUDA had been started in the process that this Python worker was forked from. Set "
                "spark.python.daemon.module=sparkdl.daemon, or make sure that the daemon's imports "
                "do not start CUDA (PYTORCH_NVML_BASED_CUDA_CHECK=1 in its environment helps)."
            )
        if self.address_space is not None:
            return (
                f"its address space is limited to {self.address_space / 2**30:.3g} GiB, and CUDA "
                "reserves more than a node has memory. Unset spark.executor.pyspark.memory."
            )
        if self.visible is not None:
            return f"{VISIBLE}={self.visible} names no GPU of this node."
        if not self.driver:
            return "there is no GPU driver on the node, or none in the container."
        return f"it says: {self.said or 'nothing'}."


def task_device(before: torch.device | None = None) -> torch.device:
    """Choose this task's device, and make a GPU torch's current device.

    This is the GPU that Spark assigned, the first if there are several. Without an assignment it is
    ``before``, if given, on which this process keeps something of an earlier task; else the node's
    GPUs are used in turn, by partition; without GPUs it is the CPU. Once a GPU is current, memory
    is pinned for it, and a user's ``.cuda()`` goes there.
    """
    context = TaskContext.get()
    gpus, assigned = gpus_here("auto", context)
    if not gpus:
        return torch.device("cpu")
    if not assigned and before is not None and before.type == "cuda":
        return use_gpu(before.index)
    partition = 0 if context is None or assigned else context.partitionId()
    return use_gpu(gpus[partition % len(gpus)])


def gpus_here(kind: str, context: TaskContext | None) -> tuple[list[Gpu], bool]:
    """Return the GPUs that a task may use here, and whether Spark has assigned them to it.

    Without an assignment they are all GPUs of the node; ``kind`` "cpu": none.
    """
    if kind == "cpu":
        return [], False
    gpu = None if context is None else context.resources().get("gpu")
    found: list[Gpu] = []
    if gpu is not None:
        found = gpus_of(gpu.addresses)
    elif torch.cuda.is_available():
        found = list(range(torch.cuda.device_count()))
    if kind == "cuda" and not found:
        raise SessionError(f'device="cuda": torch sees no GPU on this node: {Sight.here().reason}')
    return found, gpu is not None


AMOUNT = "spark.task.resource.gpu.amount"
logger = logging.getLogger("sparkdl")
_looked: dict[tuple[str, frozenset[str]], list[int]] = {}
"""The number of GPUs found on each executor, by application and its executors."""


def within_gpus(context: SparkContext, replicas: int, chosen: bool, engine: str) -> int:
    """Return the number of replicas, after checking that they do not share GPUs by accident.

    ``chosen``: the user has set it. The engine "local" has as many as others, and uses no GPU.
    """
    assigned = context._conf.contains(AMOUNT)
    if is_local(context):
        return replicas if chosen else _capped(replicas, torch.cuda.device_count())
    if engine == "local" or (
        not assigned and torch.version.cuda is None and torch.version.hip is None
    ):
        return replicas
    there, counts = _look(context)
    problem = None if assigned else sharing(there, counts, replicas)
    if problem and not chosen:
        raise SessionError(problem)
    if problem:
        logger.warning("%s", problem)
    if assigned and float(context._conf.get(AMOUNT, "1")) > 1:
        logger.warning(
            "a task uses one GPU, and the others that Spark assigns to it stay idle: set %s=1.",
            AMOUNT,
        )
    return replicas


def _capped(replicas: int, gpus: int) -> int:
    if 0 < gpus < replicas:
        logger.info(
            "%d replicas, one for each GPU, and not one for each of %d task slots: set replicas= "
            "to override this.",
            gpus,
            replicas,
        )
        return gpus
    return replicas


def sharing(there: Sequence[Executor], counts: Sequence[int], replicas: int) -> str | None:
    """Return a message if a host may run more tasks at a time than it has GPUs, else None."""
    slots: dict[str, int] = {}
    gpus: dict[str, int] = {}
    for executor, count in zip(there, counts, strict=False):
        slots[executor.host] = slots.get(executor.host, 0) + executor.slots
        gpus[executor.host] = max(count, gpus.get(executor.host, 0))
    for host, count in gpus.items():
        tasks = min(slots[host], replicas)
        if 0 < count < tasks:
            return (
                f"up to {tasks} replicas would share {count} GPU{'s' * (count > 1)} on {host}, "
                "each with a model of its own in its memory. Let Spark assign them: "
                "spark.executor.resource.gpu.amount and .discoveryScript say how many an executor "
                f"has, {AMOUNT}=1 gives each task one. Pass replicas= to have this many anyway; "
                "spark.executorEnv.CUDA_VISIBLE_DEVICES= (empty) leaves GPUs alone."
            )
    return None


def count_gpus(partition: int, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Task: yield the number of GPUs that a task sees here, pickled.

    A :class:`SessionError` is yielded too, for the driver to raise, because Spark would retry the
    task.
    """
    for _ in frames:
        pass
    try:
        gpus, _ = gpus_here("auto", TaskContext.get())
        yield pickle.dumps(len(gpus))
    except SessionError as error:
        yield pickle.dumps(error)


def _look(context: SparkContext) -> tuple[list[Executor], list[int]]:
    """Return the executors, and the number of GPUs that a task sees on each of them."""
    there = executors(context)
    key = context.applicationId, frozenset(executor.name for executor in there)
    if there and key in _looked:
        return there, _looked[key]
    places = task_per_executor(context, [*there] or [None])
    with executor_awaited(context), stage_name(context, "look for GPUs"):
        counted = collect_and_forget(map_frames(places, count_gpus))
    counts = [pickle.loads(frame) for frame in counted]
    for count in counts:
        if isinstance(count, SessionError):
            raise count
    _looked[key] = counts
    return there, counts
