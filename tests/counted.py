"""The calls of all threads: on a GPU a backward runs in a thread of autograd's, which `record_routes` does not see."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from accel import reset_routes, route_counts


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """How often each (callable, route) was taken inside; filled when the block ends."""
    calls = Counter()
    reset_routes()
    yield calls
    for route, count in route_counts().items():
        calls[route.callable, str(route)] += count
