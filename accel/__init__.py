"""accel: native short causal convolutions for FLA, Mamba and Transformers scripts, with one line.

from accel import accelerate_fla
accelerate_fla(targets="short_conv")
"""

from accel import nn
from accel.dispatch import explain
from accel.environment import check
from accel.errors import AccelError, PackedMetadataError, StateIndexError
from accel.reasons import Reason
from accel.routes import Route, last_route, record_routes, reset_routes, route_counts
from accel.switch import (
    accelerate,
    accelerate_fla,
    accelerate_mamba,
    accelerate_transformers,
    accelerated,
    is_accelerated,
    restore,
)
from accel.warmup import warmup

__all__ = [
    "AccelError",
    "PackedMetadataError",
    "Reason",
    "Route",
    "StateIndexError",
    "accelerate",
    "accelerate_fla",
    "accelerate_mamba",
    "accelerate_transformers",
    "accelerated",
    "check",
    "explain",
    "is_accelerated",
    "last_route",
    "nn",
    "record_routes",
    "reset_routes",
    "restore",
    "route_counts",
    "warmup",
]
