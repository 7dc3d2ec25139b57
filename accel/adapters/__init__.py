"""One file an upstream; `ADAPTERS` is the one list, by the names that compat_matrix.yaml uses."""

from accel.adapters import fla

ADAPTERS = {**fla.ADAPTERS}
