"""What a release really has, by importing it: runs in a process of its own that sees the release's folder first.

Reads from stdin what is asked for, writes one line of JSON. Extensions that are not built are empty modules, and Triton
kernels are never run: where there is no GPU, its stand-in driver serves their import.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import types
import warnings
from typing import Any

from accel.tables import Parameters, look_up

EXTENSIONS = ("causal_conv1d_cuda", "selective_scan_cuda")


def main() -> None:
    warnings.simplefilter("ignore")
    pkgutil.extend_path = lambda path, name: path  # an FLA would add every other `fla` folder on the path to its own
    for name in EXTENSIONS:
        sys.modules[name] = types.ModuleType(name)
    try:
        importlib.import_module("accel.triton_cpu").install()
    except ImportError:
        pass  # without Triton: what needs it says so itself
    places = json.load(sys.stdin)
    print(json.dumps([_look(module, attribute) for module, attribute in places]))


def _look(module: str, attribute: str) -> dict[str, Any]:
    """One place: the type of what it holds; of a function its parameters and who its own module says it is."""
    try:
        owner = importlib.import_module(module)
    except Exception as error:  # an upstream may fail in any way while it is imported
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        value = look_up(owner, attribute)
    except KeyError:
        return {"type": None}
    if not isinstance(value, types.FunctionType):
        return {"type": type(value).__name__}
    return {
        "type": "function",
        "parameters": Parameters.of(value),
        "module": value.__module__,
        "name": value.__qualname__,
    }
