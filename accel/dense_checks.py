"""Which dense convolutions are native: what no backend could compute, and the written rules that give a call to torch.

Pure, as `accel.admission` is. `dense_errors` is what a caller got wrong; `RULES` is where torch serves a good call
because it does it right, `FASTER` where it was measured to be faster. Imports no more than admission does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from accel.call import DenseCall
from accel.checks import device_checks
from accel.environment import DeviceFacts
from accel.kernels.contract import DENSE, VECTOR, has_whole_vectors
from accel.reasons import Decline, Reason


@dataclass(frozen=True)
class Rule:
    """A kind of call that torch serves on a GPU: `applies` says which, the rest says why in the words of a Decline."""

    reason: Reason
    argument: str
    expected: str
    applies: Callable[[DenseCall], bool]
    found: Callable[[DenseCall], str]


def reach(call: DenseCall) -> int:
    """How far back a filter looks: (K-1) * dilation."""
    return (call.weight.shape[2] - 1) * call.dilation


RULES = (
    # exact fp32, and TF32 where torch.backends.cudnn says so, are torch's own; so is float64
    Rule(
        Reason.DTYPE,
        "x",
        " or ".join(map(str, DENSE.dtypes)),
        lambda call: call.x.dtype not in DENSE.dtypes,
        lambda call: f"{call.x.dtype}",
    ),
    # a group is a convolution too narrow for a tile; depthwise ones are `causal_conv1d`
    Rule(Reason.UNSUPPORTED_ARGUMENT, "groups", "1", lambda call: call.groups != 1, lambda call: f"{call.groups}"),
    Rule(
        Reason.SHAPE,
        "x",
        f"extents and (K-1) * dilation up to {DENSE.max_extent}",
        lambda call: any(n > DENSE.max_extent for n in (*call.x.shape, call.weight.shape[0], reach(call))),
        lambda call: f"{list(call.x.shape)} with a reach of {reach(call)}",
    ),
)

# what torch was measured to do faster, on an H200: benchmarks/NOTES.md has the figures
FASTER = (
    Rule(
        Reason.LAYOUT,
        "x",
        f"rows of whole vectors: T, strides and offset multiples of {VECTOR}",
        lambda call: not has_whole_vectors(call.x),
        lambda call: f"{list(call.x.shape)} with strides {call.x.stride()}",
    ),
)


def dense_errors(call: DenseCall) -> Iterator[Decline]:
    """What is wrong with a call, whoever serves it; all tensors are tensors."""
    x, weight, bias, dilation, groups, activation = call
    for name, value in (("dilation", dilation), ("groups", groups)):
        if value < 1:
            yield Decline(Reason.UNSUPPORTED_ARGUMENT, name, "at least 1", f"{value}")
            return
    if activation not in DENSE.activations:
        yield Decline(Reason.ACTIVATION, "activation", ", ".join(map(repr, DENSE.activations)), repr(activation))
    if not x.is_floating_point():
        yield Decline(Reason.DTYPE, "x", "a floating dtype", f"{x.dtype}", TypeError)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            yield Decline(Reason.DTYPE, name, f"x's dtype {x.dtype}", f"{tensor.dtype}", TypeError)
    if x.dim() != 3 or not x.shape[1]:
        yield Decline(Reason.SHAPE, "x", "[B, Cin, T]", f"{list(x.shape)}")
    elif weight.dim() != 3 or weight.shape[1] * groups != x.shape[1] or weight.shape[0] % groups or not weight.shape[2]:
        expected = f"[Cout, {x.shape[1]} / groups, K], groups = {groups}"
        yield Decline(Reason.SHAPE, "weight", expected, f"{list(weight.shape)}")
    elif bias is not None and bias.shape != (weight.shape[0],):
        yield Decline(Reason.SHAPE, "bias", f"[{weight.shape[0]}]", f"{list(bias.shape)}")


def dense_rules(call: DenseCall, facts: DeviceFacts) -> Iterator[Decline]:
    """Every rule that gives a call without errors to torch."""
    failed, plain = device_checks(call.x, ("x", "weight", "bias"), (call.x, call.weight, call.bias), facts)
    yield from failed
    if plain and facts.backend == "cute":
        for rule in (*RULES, *FASTER):
            if rule.applies(call):
                yield Decline(rule.reason, rule.argument, rule.expected, rule.found(call), NotImplementedError)


def dense_checks(call: DenseCall, facts: DeviceFacts) -> Iterator[Decline]:
    """All of them: what keeps the call of a swapped module from being native."""
    wrong = list(dense_errors(call))
    yield from wrong or dense_rules(call, facts)


def first(declines: Iterator[Decline]) -> Decline | None:
    """The first failed check; older versions of torch.compile know no next() with a default."""
    for decline in declines:
        return decline
    return None
