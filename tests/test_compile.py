"""The registered operators: opcheck, what modes and fake tensors see, decisions while tracing; and real upstreams,
compiled, by compile_parity.py in a process of its own.
"""

import pytest
import torch
from test_admission import ROWS, made_up, mutated
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from upstreams import ROOT, causal_conv1d, fla, mamba_ssm, run_parity, transformers

from accel import admission, environment, ops

PARITY = ROOT / "tests" / "compile_parity.py"
MODELS = ROOT / "tests" / "compile_models_parity.py"
N, B, D, T, W = 3, 2, 8, 5, 4


def normal(device, *shape, leaf=False):
    return torch.randn(shape).to(device).requires_grad_(leaf)


def ints(device, values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def channel_last(device, batch=B, tokens=T, leaf=False):
    return normal(device, batch, tokens, D).transpose(1, 2).detach().requires_grad_(leaf)


def conv_arguments(device, kind):
    x, weight, bias = channel_last(device, leaf=True), normal(device, D, W, leaf=True), normal(device, D, leaf=True)
    if kind == "everything":
        residual, initial = normal(device, B, D, T, leaf=True), normal(device, B, D, W, leaf=True)
        return x, weight, bias, residual, "silu", None, None, initial, True, W, True, False
    if kind == "packed":
        bounds = ints(device, [0, 3, B * T])
        return x, weight, None, None, "swish", bounds, None, normal(device, 2, D, W - 1), True, W - 1, False, True
    if kind == "documents":
        documents = ints(device, [[0, 0, 1, 1, 1], [2, 2, 2, 2, -1]])
        return x, weight, bias, None, None, None, documents, None, False, W - 1, False, False
    return normal(device, B, D, T), weight.detach(), None, None, None, None, None, None, False, W - 1, False, False


def backward_arguments(device, kind):
    x, dy, weight = channel_last(device), normal(device, B, D, T), normal(device, D, W)
    if kind == "everything":
        dfinal, initial, bias = normal(device, B, D, W), normal(device, B, D, W), normal(device, D)
        states = (initial, W, True, True, True, True)
        return x, dy, dfinal, weight, bias, None, "silu", None, None, *states, False, True
    return x, dy, None, weight, None, None, None, None, None, None, W - 1, False, True, False, False, False, False


def update_arguments(device, kind):
    x, weight, bias = normal(device, N, D), normal(device, D, W), normal(device, D)
    state, slots = normal(device, 5, D, W), ints(device, [4, -1, 0])
    if kind == "slots":
        return x, "ND", state, weight, bias, normal(device, N, D), "silu", None, slots, -1, None
    if kind == "tokens":
        between = torch.zeros(N, 2, D, W, device=device)
        return normal(device, N, D, 2), "NDT", state, weight, bias, None, "silu", None, slots, -1, between
    if kind == "ring":
        return x, "ND", state[:N], weight, None, None, None, ints(device, [0, 1, 7]), None, -1, None
    return x, "ND", None, weight, None, None, None, None, None, -1, None


def states_arguments(device, kind):
    initial = normal(device, B, D, W)
    return channel_last(device), initial if kind == "initial" else None, None, W, kind == "initial"


CASES = {
    "causal_conv1d": (conv_arguments, ("everything", "packed", "documents", "plain")),
    "causal_conv1d_backward": (backward_arguments, ("everything", "weight alone")),
    "causal_conv1d_update": (update_arguments, ("slots", "tokens", "ring", "no state")),
    "causal_conv1d_states": (states_arguments, ("initial", "plain")),
}
every_case = pytest.mark.parametrize(
    "name, kind", [(name, kind) for name, (_, kinds) in CASES.items() for kind in kinds]
)


@every_case
def test_opcheck(device, name, kind):
    opcheck(getattr(torch.ops.accel, name).default, CASES[name][0](device, kind))


@every_case
def test_a_fake_call_looks_like_the_real_one(device, name, kind):
    operator, arguments = getattr(torch.ops.accel, name), CASES[name][0](device, kind)
    real = torch.utils._pytree.tree_leaves(operator(*arguments))
    with FakeTensorMode() as mode:
        arguments = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        fake = torch.utils._pytree.tree_leaves(operator(*arguments))
    for ours, expected in zip(fake, real, strict=True):
        for fact in ("shape", "dtype", "device", "requires_grad"):
            assert getattr(ours, fact) == getattr(expected, fact), fact
        assert ours.stride() == expected.stride()


class DispatchMode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


class FunctionMode(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


def everything(device):
    """A step of every operation, each with its own inputs; returns what they gave."""
    torch.manual_seed(1)
    x, weight, bias = channel_last(device, leaf=True), normal(device, D, W, leaf=True), normal(device, D, leaf=True)
    y, final = ops.causal_conv1d(x, weight, bias, activation="silu", return_final_states=True)
    gradients = torch.autograd.grad((y, final), (x, weight, bias), (torch.ones_like(y), torch.ones_like(final)))
    state = normal(device, N, D, W)
    with torch.no_grad():
        step = ops.causal_conv1d_update(normal(device, N, D), state, weight, bias, activation="silu")
    last = ops.causal_conv1d_varlen_states(normal(device, T, D), ints(device, [0, 2, T]), W)
    return y, final, *gradients, step, state, last


@pytest.mark.parametrize("mode", [DispatchMode, FunctionMode])
def test_a_mode_sees_every_operation(device, mode):
    expected = everything(device)
    with mode() as seeing:
        found = everything(device)
    names = ["causal_conv1d", "causal_conv1d_backward", "causal_conv1d_update", "causal_conv1d_states"]
    if mode is FunctionMode:
        del names[1]  # the autograd engine calls backward on its own
    seen = [name.removesuffix(".default") for name in seeing.seen if name.startswith("accel.")]
    assert seen == [f"accel.{name}" for name in names]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def test_a_step_that_was_kept_is_seen_by_modes(device):
    """A decode call whose plan is kept goes past nobody."""
    x, state, weight = normal(device, N, D), normal(device, N, D, W), normal(device, D, W)
    for _ in range(3):
        ops.causal_conv1d_update(x, state, weight)
    for mode in (DispatchMode, FunctionMode):
        with mode() as seeing:
            ops.causal_conv1d_update(x, state, weight)
        assert [name.removesuffix(".default") for name in seeing.seen if "accel" in name] == [
            "accel.causal_conv1d_update"
        ]


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and warns of every look at a shape
def test_torch_jit_trace(device):
    """A traced step has its operator in it; a sequence is refused, because sizes are tensors there."""
    arguments = [normal(device, N, D), normal(device, N, D, W), normal(device, D, W)]
    for _ in range(2):  # a kept plan does not hide the trace
        ops.causal_conv1d_update(*arguments)
    traced = torch.jit.trace(ops.causal_conv1d_update, arguments, check_trace=False)
    fresh = [torch.randn_like(tensor) for tensor in arguments]
    eager = [tensor.clone() for tensor in fresh]
    assert torch.equal(traced(*fresh), ops.causal_conv1d_update(*eager)) and torch.equal(fresh[1], eager[1])
    assert "accel::causal_conv1d_update" in str(traced.graph)
    with pytest.raises(TypeError, match="state_len: expected an int, got Tensor"):
        torch.jit.trace(ops.causal_conv1d, (channel_last(device), arguments[2]), check_trace=False)


def test_eager_calls_do_not_go_through_the_operators(device):
    x, weight, state = channel_last(device), normal(device, D, W), normal(device, B, D, W)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        everything(device)
        with torch.device("meta"):  # a default device is a mode that looks at nothing
            y = ops.causal_conv1d(x, weight, initial_states=state)
            ops.causal_conv1d_update(x[:, :, 0].contiguous(), state, weight)
    assert y.device == x.device
    assert not [event.key for event in profiled.key_averages() if event.key.startswith("accel::causal")]


def test_fake_tensors_on_a_new_device():
    """The facts of a device are read for the first time under a mode that makes every tensor fake."""
    environment.forget()
    with FakeTensorMode():
        y = ops.causal_conv1d(torch.empty(B, D, T), torch.empty(D, W))
    assert y.shape == (B, D, T)
    assert torch.equal(*(ops.causal_conv1d(torch.ones(B, D, T), torch.ones(D, W)) for _ in range(2)))
    ops.causal_conv1d(torch.ones(1, D, T), torch.ones(D, W), cu_seqlens=torch.tensor([0, 2, T]))


def test_no_second_derivative(device):
    x, weight = channel_last(device, leaf=True), normal(device, D, W, leaf=True)
    with DispatchMode():
        y = ops.causal_conv1d(x, weight)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative is not implemented"):
        dx.sum().backward()


def test_an_operator_refuses_what_the_operation_refuses(device):
    x, weight = normal(device, B, D, T), normal(device, D + 1, W)
    with pytest.raises(ValueError, match="^causal_conv1d: weight: expected "):
        torch.ops.accel.causal_conv1d(x, weight, None, None, None, None, None, None, False, W - 1, False, False)
    arguments = list(update_arguments(device, "slots"))
    with pytest.raises(RuntimeError, match="^causal_conv1d_update: weight: expected no gradient"):
        torch.ops.accel.causal_conv1d_update(*arguments[:3], arguments[3].requires_grad_(), *arguments[4:])


def test_aliasing_is_found_when_the_graph_runs(device):
    """While a graph is made there are no addresses; an output over its input is still refused, before it is written."""
    x, weight, memory = normal(device, N, D, 2), normal(device, D, W), normal(device, N, 2, D, W)
    before = memory.clone()

    def step(x, memory, weight):
        return ops.causal_conv1d_update(x, memory[:, 0], weight, intermediate_states_out=memory)

    run = torch.compile(step, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(ValueError, match="intermediate_states_out: expected memory of its own"):
        run(x, memory, weight)
    assert torch.equal(memory, before)


# dynamo cannot make these, or what is wrong exists only outside of a graph
NOT_TRACED = ("subclass", "fake", "elsewhere", "vmap", "grad transform", "unknown GPU", "expanded")
ALIASED = ("out is initial_states", "out inside x", "dx is x", "dx is dy")
TRACED = [
    (key, name)
    for key, rows in ROWS.items()
    for name in rows
    if not any(word in name for word in (*NOT_TRACED, *ALIASED)) and not ROWS[key][name].facts
]


@pytest.mark.parametrize("key", ROWS)
def test_a_decision_while_tracing_is_the_decision(key):
    """Every declined call of test_admission.py that can be traced; and the good call."""
    facts = made_up("cute")
    for name in (name for kind, name in TRACED if kind == key):
        call = mutated(key, name)
        expected = admission.admit(call, facts)
        answers = []

        def decide(x, call=call, answers=answers):
            decline = admission.admit(call, facts)
            answers.append((decline.reason, decline.argument))
            return x + 1

        torch._dynamo.reset()
        torch.compile(decide, backend="eager", fullgraph=True)(torch.zeros(1))
        assert answers == [(expected.reason, expected.argument)], name


def test_on_the_cpu():
    """FLA's kernels in Triton's interpreter, where a declined call needs them; a GPU, where there is one, is hidden."""
    print(
        run_parity(
            PARITY, "not gpu", [fla("0.6.0"), causal_conv1d("1.7.0")], TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""
        )
    )


@pytest.mark.gpu
def test_on_the_gpu():
    print(run_parity(PARITY, "gpu", [fla("0.6.0"), causal_conv1d("1.7.0")]))


def test_models_on_the_cpu():
    folders = [mamba_ssm("2.3.2.post1"), transformers("5.24.0")]
    print(run_parity(MODELS, "", folders, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"))


@pytest.mark.gpu
def test_models_on_the_gpu():
    print(run_parity(MODELS, "", [mamba_ssm("2.3.2.post1"), transformers("5.24.0")]))
