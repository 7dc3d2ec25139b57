"""The recorder of routes: last, counts, recordings, one warning a kind, in one thread and in several."""

import importlib
import logging
import pickle
import threading
from collections import Counter

import pytest
import torch
from counted import counted
from upstreams import ROOT, run_python

from accel import last_route, record_routes, reset_routes, routes
from accel.bench.cases import GateError
from accel.routes import Route, record, route_counts

NATIVE = Route("a", "update", "native", "cpu", None, "")
OTHER = Route("b", "update", "native", "cute", None, "")
FALLBACK = Route("a", "update", "fallback", None, "dtype", "x: expected torch.float32, got torch.float64")
ERROR = Route("a", "update", "error", None, "ValueError", "no")


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch):
    """A recorder of its own for each test."""
    monkeypatch.setattr(routes, "_counts", {})
    monkeypatch.setattr(routes, "_finished", Counter())
    monkeypatch.setattr(routes, "_firsts", {})
    monkeypatch.setattr(routes, "_thread", routes._Thread())


def in_threads(count, function):
    failures = []

    def run():
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    "route, text",
    [(NATIVE, "native:cpu"), (OTHER, "native:cute"), (FALLBACK, "fallback:dtype"), (ERROR, "error:ValueError")],
)
def test_a_route_reads_well(route, text):
    assert str(route) == text


def test_the_last_route_is_of_a_target_or_of_any():
    assert last_route() is None and last_route("a") is None
    record(FALLBACK)
    record(OTHER)
    assert last_route() is OTHER and last_route("b") is OTHER
    assert last_route("a") is FALLBACK and last_route("c") is None


def test_the_last_route_is_of_a_thread():
    record(NATIVE)

    def other():
        assert last_route() is None
        record(OTHER)
        assert last_route() is OTHER

    in_threads(3, other)
    assert last_route() is NATIVE


def test_counts_of_all_threads_finished_ones_too():
    gate = threading.Barrier(4)

    def calls():
        gate.wait()
        for _ in range(500):
            record(NATIVE)
            route_counts()
        record(FALLBACK)

    in_threads(4, calls)
    record(NATIVE)
    assert route_counts() == {NATIVE: 2001, FALLBACK._replace(detail=""): 4}


def test_counts_are_read_while_no_thread_moves_them(monkeypatch):
    class Watched(Counter):
        def copy(self):
            assert routes._lock.locked()
            return super().copy()

    monkeypatch.setattr(routes, "_finished", Watched({NATIVE: 2}))
    record(NATIVE)
    assert route_counts() == {NATIVE: 3}


def test_reports_fold():
    """Those of ranks come through a pickle."""
    first, second = {NATIVE: 2, OTHER: 1}, pickle.loads(pickle.dumps({NATIVE: 3, FALLBACK: 1}))
    assert routes.fold([first, second]) == {NATIVE: 5, OTHER: 1, FALLBACK: 1}
    assert first == {NATIVE: 2, OTHER: 1} and routes.fold([]) == {}


def test_counts_leave_the_detail_out():
    record(FALLBACK)
    record(FALLBACK._replace(detail="weight: expected torch.float32, got torch.float64"))
    assert route_counts() == {FALLBACK._replace(detail=""): 2}


def test_counts_are_a_copy():
    record(NATIVE)
    route_counts().clear()
    assert route_counts() == {NATIVE: 1}


def test_recordings_nest():
    record(NATIVE)
    with record_routes() as outer:
        record(FALLBACK)
        with record_routes() as inner:
            record(OTHER)
        record(NATIVE)
        with record_routes() as empty:
            pass
        record(ERROR)
    record(NATIVE)
    assert outer == [FALLBACK, OTHER, NATIVE, ERROR] and inner == [OTHER] and empty == []


def test_equal_recordings_end_one_by_one():
    with record_routes() as outer:
        with record_routes() as inner:
            pass
        record(NATIVE)
    assert outer == [NATIVE] and inner == []


def test_a_recording_ends_with_an_exception():
    with pytest.raises(KeyError), record_routes() as seen:
        record(NATIVE)
        raise KeyError
    record(OTHER)
    assert seen == [NATIVE]


def test_a_recording_is_of_its_thread():
    with record_routes() as seen:
        in_threads(2, lambda: record(OTHER))
        record(NATIVE)
    assert seen == [NATIVE]


def test_calls_of_all_threads_can_be_counted(monkeypatch):
    """As tests and benchmarks have to: what a backward on a GPU calls is called in another thread."""
    monkeypatch.syspath_prepend(str(ROOT))
    presence = importlib.import_module("benchmarks.presence")

    def calls():
        record(NATIVE)
        in_threads(2, lambda: record(NATIVE))

    record(NATIVE)
    with counted() as found:
        calls()
    assert found == {("update", "native:cpu"): 3}
    presence.native_calls(calls, 3)
    with pytest.raises(GateError, match="3 native calls, expected 1"):
        presence.native_calls(calls, 1)
    with pytest.raises(GateError, match="2 of 2 calls were not native, first: update fallback: x: expected torch.flo"):
        presence.native_calls(lambda: in_threads(2, lambda: record(FALLBACK)), 2)


def test_one_warning_for_each_kind_of_fallback(caplog):
    kinds = [
        FALLBACK,
        FALLBACK._replace(reason="shape"),
        FALLBACK._replace(callable="other"),
        FALLBACK._replace(target="b"),
        ERROR,
    ]
    with caplog.at_level(logging.DEBUG, logger="accel"):
        for kind in (*kinds, *kinds, NATIVE):
            record(kind)
    assert [entry.levelname for entry in caplog.records] == ["WARNING"] * 5 + ["DEBUG"] * 5
    text = "a.update took fallback:dtype: x: expected torch.float32, got torch.float64"
    assert caplog.records[0].getMessage().startswith(text) and "logged once" in caplog.records[0].getMessage()
    assert caplog.records[5].getMessage() == text


def test_the_first_of_each_kind_is_kept_with_its_line():
    def fall_back(route):
        record(route)

    line = fall_back.__code__.co_firstlineno + 1
    for route in (NATIVE, FALLBACK, FALLBACK._replace(detail="later"), ERROR):
        fall_back(route)
    where = f"{__file__}:{line} in fall_back"
    assert routes.first_of_kinds() == {
        ("a", "update", "fallback", "dtype"): (FALLBACK.detail, where),
        ("a", "update", "error", "ValueError"): (ERROR.detail, where),
    }


def test_a_child_may_be_born_while_the_recorder_is_locked():
    """Or the child's first count would wait for a thread that it does not have."""
    code = """
import os, threading, time
from accel import routes
stop = threading.Event()
def busy():
    while not stop.is_set():
        with routes._lock:
            time.sleep(0.001)
threading.Thread(target=busy).start()
for _ in range(5):
    child = os.fork()
    if not child:
        routes.route_counts()
        os._exit(3)
    end = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, 9)
    print(done[1] >> 8)
stop.set()
"""
    done = run_python(code)
    assert done.stdout.split() == ["3"] * 5, done.stdout + done.stderr


def test_one_warning_from_many_threads(caplog):
    gate = threading.Barrier(8)

    def fall_back():
        gate.wait()
        record(FALLBACK)

    with caplog.at_level(logging.WARNING, logger="accel"):
        in_threads(8, fall_back)
    assert len(caplog.records) == 1


def test_reset(caplog):
    record(NATIVE)
    in_threads(1, lambda: record(FALLBACK))
    reset_routes()
    assert route_counts() == {} and routes.first_of_kinds() == {}
    caplog.clear()
    record(FALLBACK)
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    assert route_counts() == {FALLBACK._replace(detail=""): 1}


def test_a_call_in_a_compiled_graph_is_recorded_when_it_is_traced(caplog):
    def step(x):
        routes.note(*FALLBACK)
        routes.note(*NATIVE)
        return x + 1

    run = torch.compile(step, backend="eager", fullgraph=True)
    with record_routes() as seen, caplog.at_level(logging.WARNING, logger="accel"):
        for _ in range(3):
            run(torch.zeros(2))
    assert seen == [FALLBACK, NATIVE] and last_route("a") == NATIVE
    assert route_counts() == {FALLBACK._replace(detail=""): 1, NATIVE: 1}
    assert len([entry for entry in caplog.records if entry.name == "accel"]) == 1


TWICE = """
from accel.routes import Route, record
for _ in range(2):
    record(Route("a", "update", "fallback", None, "dtype", "why"))
"""


@pytest.mark.parametrize("level, lines", [("debug", 2), ("DEBUG", 2), ("", 1)])
def test_the_environment_asks_for_all(level, lines):
    done = run_python(TWICE, env={"ACCEL_LOG": level})
    assert done.returncode == 0 and done.stdout == ""
    assert [line.startswith("a.update took fallback:dtype: why") for line in done.stderr.splitlines()] == [True] * lines
