"""What served each call: the one recorder of routes, with counters, first-fallback log and profiler ranges.

Recording costs a thread-local write and a counter; ranges cost nothing while no profiler is on.
A call in a compiled or exported graph is recorded when it is traced, not each time the graph runs.
The one surprise: the first fallback of each kind walks the stack, for the line of the caller's own code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import sysconfig
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.autograd.profiler as profiler

from accel.tracing import constant

log = logging.getLogger("accel")
if os.environ.get("ACCEL_LOG", "").lower() == "debug":
    log.setLevel(logging.DEBUG)
    if not log.handlers and not logging.getLogger().handlers:
        log.addHandler(logging.StreamHandler())


class Route(NamedTuple):
    """What served one call: `path` is native, fallback or error; `backend` cute or cpu; `reason` why not native."""

    target: str
    callable: str
    path: str
    backend: str | None
    reason: str | None
    detail: str

    def __str__(self) -> str:
        return f"{self.path}:{self.backend if self.path == 'native' else self.reason}"


class Kind(NamedTuple):
    """What is logged once: a callable's fallbacks for one reason, or its errors of one type."""

    target: str
    callable: str
    path: str
    reason: str | None


class First(NamedTuple):
    """The first call of its kind: what failed, and the line that it came from."""

    detail: str
    where: str


class _Thread(threading.local):
    def __init__(self):
        self.last: dict[str | None, Route] = {}
        self.recordings: list[list[Route]] = []
        self.counts: defaultdict[Route, int] = defaultdict(int)
        self.notes = self.last, self.recordings, self.counts
        with _lock:
            for thread, counts in list(_counts.items()):
                if not thread.is_alive():
                    _finished.update(_counts.pop(thread, counts))
            _counts[threading.current_thread()] = self.counts


_lock = threading.Lock()
_counts: dict[threading.Thread, defaultdict[Route, int]] = {}
_finished: Counter[Route] = Counter()  # of the threads that have ended
_firsts: dict[Kind, First] = {}
_thread = _Thread()
# a child must not be born while another thread of the parent holds the lock
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

# whose lines are nobody's mistake: accel's, torch's and Python's own
_INSIDE = tuple(
    os.path.join(folder, "")
    for folder in (os.path.dirname(__file__), os.path.dirname(torch.__file__), sysconfig.get_path("stdlib"))
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def record(route: Route) -> None:
    """Note the route of the call that this thread is about to make."""
    last, recordings, counts = _thread.notes  # one read: a thread-local costs more than what follows
    last[None] = last[route[0]] = route
    counts[route._replace(detail="") if route[5] else route] += 1
    if recordings:
        for recording in recordings:
            recording.append(route)
    if route[2] != "native":
        _log_once(route)


@constant
def note(*fields: str | None) -> None:
    """`record` for a call that is being traced: done once, while the graph is made, and nothing when the graph runs."""
    record(Route(*fields))


def failed(route: Route, error: Exception) -> None:
    """The call that was noted as `route` went wrong: note that in its place."""
    thread = _thread
    thread.counts[route] -= 1
    for recording in thread.recordings:
        if route in recording:
            del recording[len(recording) - 1 - recording[::-1].index(route)]
    record(Route(route.target, route.callable, "error", None, type(error).__name__, str(error)))


def _log_once(route: Route) -> None:
    kind = Kind(route.target, route.callable, route.path, route.reason)
    with _lock:
        known = kind in _firsts
        if not known:
            _firsts[kind] = First(route.detail, _caller())
    if known:
        log.debug("%s.%s took %s: %s", route.target, route.callable, route, route.detail)
        return
    log.warning(
        "%s.%s took %s: %s (logged once for each reason; accel.route_counts() has all)",
        route.target,
        route.callable,
        route,
        route.detail,
    )


def _caller() -> str:
    """The innermost line of code that is not installed, else the innermost one outside of accel, torch and Python."""
    nearest, frame = "", sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_INSIDE, "<frozen")):
            line = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
            nearest = nearest or line
            if not any(part in file for part in _INSTALLED):
                return line
        frame = frame.f_back
    return nearest


def first_of_kinds() -> dict[Kind, First]:
    """The first fallback and the first error of each kind, in all threads."""
    with _lock:
        return dict(_firsts)


def last_route(target: str | None = None) -> Route | None:
    """The route of this thread's last call, of any target or of one; None before the first."""
    return _thread.last.get(target)


def route_counts() -> dict[Route, int]:
    """How often each route was taken, in all threads, by target, callable, path, backend and reason."""
    with _lock:  # or the counts of a thread that has ended could be read twice, while they are moved
        reports = [counter.copy() for counter in (_finished, *_counts.values())]
    return fold(reports)


def fold(reports: Iterable[Mapping[Route, int]]) -> dict[Route, int]:
    """One report of several `route_counts`: of ranks, for example, which gather theirs when it suits them."""
    total: Counter[Route] = Counter()
    for report in reports:
        total.update(report)
    return dict(+total)


def reset_routes() -> None:
    """Zero the counters and forget which fallbacks were logged."""
    with _lock:
        for counter in (_finished, *_counts.values()):
            counter.clear()
        _firsts.clear()


@contextlib.contextmanager
def record_routes() -> Iterator[list[Route]]:
    """Collect the route of every call that this thread makes inside, in order.

    What a backward calls on a GPU (a checkpoint's second forward, a fused function's convolutions) is another thread's,
    one of autograd's, and not among them; `route_counts` has the calls of all threads.
    """
    recording: list[Route] = []
    _thread.recordings.append(recording)
    try:
        yield recording
    finally:
        # by identity: two nested recordings hold equal lists
        _thread.recordings[:] = [kept for kept in _thread.recordings if kept is not recording]


def profiling() -> bool:
    """Whether a torch profiler (or `emit_nvtx`) listens, so that ranges are worth their cost."""
    return profiler._is_profiler_enabled


def profiler_range(target: str, path: str) -> profiler.record_function:
    """The range that a call carries under a profiler, e.g. `accel::short_conv.native`."""
    return profiler.record_function(f"accel::{target}.{path}")
