"""Python without what macOS lacks: with this folder on PYTHONPATH, in every process from its start on.

    PYTHONPATH=tests/as_on_macos .venv/bin/python -m pytest -m "not spark and not linux"

Names that only Linux has are taken out of the modules, functions of the C library cannot be found, and
files below ``/proc`` and ``/dev/shm`` are not there. What a call does differently on macOS cannot be
shown this way.
"""

import builtins
import ctypes
import errno
import io
import os
import select
import socket

GONE = {
    socket: ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "SO_PEERCRED", "AF_NETLINK"),
    select: ("POLLRDHUP",),
    os: (
        *(
            "posix_fallocate",
            "posix_fadvise",
            "memfd_create",
            "MFD_CLOEXEC",
            "O_TMPFILE",
            "pidfd_open",
        ),
        *(
            "eventfd",
            "pipe2",
            "sched_getaffinity",
            "sched_setaffinity",
            "setns",
            "unshare",
            "splice",
        ),
        *("copy_file_range", "getrandom"),
    ),
}
IN_C = ("prctl", "mallopt", "malloc_trim")
FOLDERS = ("/proc", "/dev/shm")


def _is_gone(path: object) -> bool:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    text = os.fsdecode(path)
    return any(text == folder or text.startswith(f"{folder}/") for folder in FOLDERS)


def _without_folders(function):
    def call(path, *args, **kwargs):
        if _is_gone(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        return function(path, *args, **kwargs)

    return call


def _access(path, *args, _function=os.access, **kwargs):
    return not _is_gone(path) and _function(path, *args, **kwargs)


class _Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in IN_C:
            raise AttributeError(name)
        return super().__getattr__(name)


for module, names in GONE.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in ("stat", "lstat", "open", "listdir", "scandir", "mkdir", "statvfs"):
    setattr(os, name, _without_folders(getattr(os, name)))
os.access = _access
builtins.open = io.open = _without_folders(io.open)
ctypes.CDLL = _Library
