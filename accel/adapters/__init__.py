"""One file an upstream; `ADAPTERS` is the one list, by the names that compat_matrix.yaml uses."""

from accel.adapters import causal_conv1d, fla, transformers

ADAPTERS = {**fla.ADAPTERS, **causal_conv1d.ADAPTERS, **transformers.ADAPTERS}
