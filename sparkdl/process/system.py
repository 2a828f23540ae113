"""Differences between operating systems: Linux, which clusters run, and macOS, which laptops run.

Everything that only one of them has is here, with its replacement on the other. The rest of the package
calls this module, and names neither ``/proc`` nor a constant that one of them lacks.

Lines that the user's code and its libraries print: labelled in a worker, and reported once.

A label before each line tells which task of which iteration printed it. Libraries that report what they
load do so at each load, in each process that builds the model; :func:`reports_silenced` silences all
reports but the first.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

PROC = Path("/proc")
"""Linux's view of its processes; on other systems, ``ps`` and ``sysctl`` give this information."""
_ZEROS = bytes(1 << 20)
_MACOS_KEEPALIVE = 0x10
"""``TCP_KEEPALIVE`` of macOS, which corresponds to ``TCP_KEEPIDLE`` of Linux."""
_MACOS_ADDRESS = 0xC0206921
"""``SIOCGIFADDR`` of macOS, the number of the ioctl call for an interface's address."""
_LINUX_ADDRESS = 0x8915


@functools.cache
def on_linux() -> bool:
    """Return whether this is Linux, judged by the presence of ``/proc/self/stat``."""
    return (PROC / "self" / "stat").exists()


def keep_alive(connection: socket.socket, idle: int, interval: int, count: int) -> None:
    """Probe a silent TCP connection, so that it ends if the other host stops responding.

    ``idle`` and ``interval`` are seconds, before the first probe and between two.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    first = getattr(socket, "TCP_KEEPIDLE", None)
    if first is None:
        first = None if on_linux() else _MACOS_KEEPALIVE
    options = {
        first: idle,
        getattr(socket, "TCP_KEEPINTVL", None): interval,
        getattr(socket, "TCP_KEEPCNT", None): count,
    }
    for option, value in options.items():
        if option is not None:
            with contextlib.suppress(OSError):  # the system's default then applies
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def end_unanswered(connection: socket.socket, milliseconds: int) -> None:
    """End a TCP connection that leaves sent bytes unacknowledged for so long, if the system can."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, milliseconds)


def has_hung_up(connection: socket.socket) -> bool:
    """Return whether the other end of a stream socket has closed it; reads nothing from it."""
    poll = select.poll()
    closed = getattr(select, "POLLRDHUP", None)
    if closed is not None:
        poll.register(connection, closed)
        return bool(poll.poll(0))
    poll.register(connection, select.POLLIN)
    events = dict(poll.poll(0)).get(connection.fileno(), 0)
    if events & (select.POLLHUP | select.POLLERR):
        return True
    if not events:
        return False
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def allocate(descriptor: int, nbytes: int) -> None:
    """Allocate the blocks of a new file of ``nbytes`` bytes.

    Without them, a process that writes to the file's mapping would be killed once the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    left = nbytes
    while left:
        left -= os.write(descriptor, _ZEROS[: min(left, len(_ZEROS))])


def map_privately(descriptor: int, known: mmap.mmap | None) -> mmap.mmap:
    """Map a file as it is now; what is written to the map stays in this process.

    ``known``, the map of an earlier call, may be used again: its content is lost.
    """
    if known is not None and on_linux():
        known.madvise(mmap.MADV_DONTNEED)  # only Linux promises that the file is read again
        return known
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE)


@functools.cache
def boot_id() -> str:
    """Return an identifier of this boot of the machine, or "" if it is unknown.

    It is the same in all containers of the machine.
    """
    try:
        found = (PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        found = _output("sysctl", "-n", "kern.bootsessionuuid")
    return found.strip().replace("-", "")


def pid_namespace() -> str:
    """Return the name of this process's PID namespace; "" if the system has only one."""
    try:
        return str(os.stat(PROC / "self/ns/pid").st_ino)
    except OSError:
        return ""


def start_time(pid: int) -> str:
    """Return the start time of process ``pid`` in the system's format, or "" if there is no process."""
    if on_linux():
        fields = _stat_fields(pid)
        return fields[19] if fields and fields[0] != "Z" else ""
    state, _, started = _output("ps", "-o", "stat=,lstart=", "-p", str(pid)).strip().partition(" ")
    return "" if state.startswith("Z") else "".join(c for c in started if c.isalnum())


def parent(pid: int) -> int | None:
    """Return the number of the parent of process ``pid``, or None if there is no such process."""
    if on_linux():
        fields = _stat_fields(pid)
        return int(fields[1]) if fields else None
    found = _output("ps", "-o", "ppid=", "-p", str(pid)).strip()
    return int(found) if found.isdigit() else None


def processor_seconds() -> float:
    """Return the processor time of this process and its descendants; 0 where only Linux tells.

    On a local master these are the JVM and all of Spark's workers.
    """
    if not on_linux():
        return 0.0
    stats = {
        int(p.name): fields for p in PROC.glob("[0-9]*") if (fields := _stat_fields(int(p.name)))
    }
    mine = {os.getpid()}
    for pid in sorted(stats, key=lambda pid: int(stats[pid][19])):  # parents start first
        if int(stats[pid][1]) in mine:
            mine.add(pid)
    ticks = sum(int(field) for pid in mine for field in stats[pid][11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def address_call() -> int:
    """Return the number of the ioctl call that returns an interface's IPv4 address."""
    return _MACOS_ADDRESS if sys.platform == "darwin" else _LINUX_ADDRESS


def longest_socket_path() -> int:
    """Return how many bytes the path of a Unix socket may have, without the final zero."""
    return 103 if sys.platform == "darwin" else 107


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third on; none if the process is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _output(*command: str) -> str:
    """Return the output of a system program, in English; "" if it fails or does not exist."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        ).stdout
    except OSError:
        return ""


_label = ""
_VERBOSITY = "TRANSFORMERS_VERBOSITY"


class _Labelled:
    """A text stream that puts the present label before each line, and writes each line at once.

    Lines of several workers do not mix, unless they are flushed before they are complete, and no
    line is lost with a worker that ends.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
        if not (_label or self._line):
            return self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._stream.write("".join(f"{_label}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the line that is not complete, too."""
        if self._line:
            self._stream.write(_label + self._line)
            self._line = ""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def label_output(label: str) -> None:
    """Put ``[label]`` (empty: nothing) before each line that this process prints from now on."""
    global _label
    if label or _label:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, _Labelled):
                stream.flush()
            elif stream is not None and label:
                setattr(sys, name, _Labelled(stream))
    _label = f"[{label}] " if label else ""


def print_escaped(text: str, end: str = "\n") -> None:
    """Print a text of another process, with escapes for letters that stdout's encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end)


@contextlib.contextmanager
def reports_silenced() -> Iterator[None]:
    """Silence what transformers prints inside the block: warnings, load reports and progress bars.

    Afterwards its settings are what they were. If it is imported only inside the block, its progress
    bars are drawn, except in workers, see :mod:`sparkdl.daemon`.
    """
    library = _logging_of_transformers()
    if library is not None:
        level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
        library.set_verbosity_error()
        library.disable_progress_bar()
        try:
            yield
        finally:
            library.set_verbosity(level)
            if bars:
                library.enable_progress_bar()
        return
    if _VERBOSITY in os.environ:
        yield
        return
    os.environ[_VERBOSITY] = "error"  # which the import reads
    try:
        yield
    finally:
        del os.environ[_VERBOSITY]
        library = _logging_of_transformers()
        if library is not None:
            library.set_verbosity_warning()


def _logging_of_transformers() -> Any:
    return sys.modules.get("transformers.utils.logging")
