"""The operations, usable without any patching: shapes, dtypes and errors are in each docstring.

They can be compiled, exported, captured and checkpointed; `registered` has the operators that torch sees then.
"""

from accel.ops import registered  # noqa: F401  torch.ops.accel
from accel.ops.conv import causal_conv1d
from accel.ops.dense import causal_conv1d_dense
from accel.ops.states import causal_conv1d_varlen_states
from accel.ops.update import causal_conv1d_update

__all__ = ["causal_conv1d", "causal_conv1d_dense", "causal_conv1d_update", "causal_conv1d_varlen_states"]
