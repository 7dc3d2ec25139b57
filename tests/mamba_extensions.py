"""What mamba_ssm and FLA's layers above it run on: import this before them.

On the CPU Triton kernels run in the interpreter, which TRITON_INTERPRET=1 chooses, and what their callers ask of CUDA
is stood in for. On either device so is an extension that is not built: mamba_ssm's by the scan written out below;
causal-conv1d's raises, so that a convolution which is not native fails.
"""

import contextlib
import importlib.util
import math
import os
import sys
import types

import torch
import torch.nn.functional as F
from triton.runtime import Autotuner, driver

from accel import triton_cpu

if os.environ.get("TRITON_INTERPRET") == "1":
    triton_cpu.install()
    # a context around each kernel, and how many blocks of gradients to sum
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=1)
    NATIVE = "native:cpu"
else:
    driver.active.get_benchmarker = lambda: triton_cpu.first_wins
    torch.set_default_device("cuda")
    torch.backends.cudnn.allow_tf32 = False  # a convolution of torch is to be as exact as it is on the CPU
    NATIVE = "native:cute"


def scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
    """Mamba's selective scan, token by token: (y, y gated, the states as the extension keeps them)."""
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if delta_softplus else delta
    state, ys = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        decay = torch.exp(delta[:, :, t, None] * A)
        state = decay * state + (delta * u)[:, :, t, None] * B[:, 0, None, :, t]
        ys.append((state * C[:, 0, None, :, t]).sum(-1))
    y = torch.stack(ys, 2) + D[:, None] * u
    return y, None if z is None else y * F.silu(z), torch.stack([state, state], -1).flatten(2)[:, :, None]


def scan_fwd(*args):
    y, gated, states = scan(*args)
    return (y, states) if gated is None else (y, states, gated)


def scan_bwd(u, delta, A, B, C, D, z, delta_bias, dout, states, out, dz, delta_softplus, recompute):
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in (u, delta, A, B, C, D, z, delta_bias)]
        _, gated, _ = scan(*leaves, delta_softplus)
        *gradients, dz_new, dbias = torch.autograd.grad(gated, leaves, dout)
    dz = dz_new if dz is None else dz.copy_(dz_new)
    # like u's, so that MambaInnerFn can write into it in place
    gradients[0] = torch.empty_like(u).copy_(gradients[0])
    return (*gradients, dbias, dz, gated.detach()) if recompute else (*gradients, dbias, dz)


def unbuilt(name):
    def function(*args):
        raise AssertionError(f"a call reached {name} of the extension")

    return function


extension = types.ModuleType("causal_conv1d_cuda")
for entry in ("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update"):
    setattr(extension, entry, unbuilt(entry))
selective_scan = types.ModuleType("selective_scan_cuda")
selective_scan.fwd, selective_scan.bwd = scan_fwd, scan_bwd
for module in (extension, selective_scan):
    if importlib.util.find_spec(module.__name__) is None:
        sys.modules[module.__name__] = module


def smallest_blocks(package):
    """Let the kernels of the imported modules of a package work on the smallest blocks that they may choose."""
    for module in [module for name, module in sys.modules.copy().items() if name.startswith(package)]:
        for kernel in [kernel for kernel in vars(module).values() if isinstance(kernel, Autotuner)]:
            kernel.configs = [min(kernel.configs, key=lambda config: math.prod(filter(None, config.kwargs.values())))]
