"""Several devices, streams and threads in one process: what is kept for one of them is not another one's."""

import sys
import threading

import pytest
import reference
import torch
from upstreams import run_python

import accel
from accel import PackedMetadataError, StateIndexError, check, environment, errors, ops, reset_routes, route_counts
from accel.errors import StatusWord, pack
from accel.routes import Route, record

ROUNDS = 300


def in_threads(*functions):
    """Run them at the same time; the first failure is raised."""
    failures, gate = [], threading.Barrier(len(functions))

    def run(function):
        try:
            gate.wait()
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_a_default_device_is_that_of_fresh_memory():
    """conftest.py fills fresh memory behind torch's back; a layer that is built here still goes where it should."""
    with torch.device("meta"):
        fresh = torch.nn.Linear(2, 2).weight, torch.empty(3), torch.empty_strided((2,), (1,))
    assert all(tensor.is_meta for tensor in fresh)


@pytest.fixture
def impatient():
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_pending_error_is_raised_in_one_thread(impatient):
    """Each of the two words once, whichever threads come by, and no other error."""
    word, raised, gate = StatusWord(torch.device("cpu")), [], threading.Barrier(4)

    def poll():
        for _ in range(ROUNDS):
            if gate.wait() == 0:
                word.view[0], word.view[1] = pack(errors.SLOT_OUT_OF_RANGE, 1, 9), pack(errors.CU_SEQLENS_LAST, 2, 3)
            gate.wait()
            for _ in range(3):
                try:
                    word.raise_pending()
                except errors.AccelError as error:
                    raised.append(type(error))
            gate.wait()

    in_threads(*[poll] * 4)
    assert raised.count(StateIndexError) == raised.count(PackedMetadataError) == ROUNDS


def test_a_word_that_another_thread_takes_is_no_error():
    """Between the look at the words and the lock."""

    class Taken(list):
        looks = 0

        def __getitem__(self, index):
            self.looks += 1
            return pack(errors.SLOT_USED_TWICE, 1, 2) if self.looks == 1 else 0

    word = StatusWord(torch.device("cpu"))
    word.view = Taken([0, 0])
    word.raise_pending()


def work(device, seed, calls=8):
    """Forward, backward and decode steps of shapes that this seed alone has; checked against float64."""
    random = torch.Generator().manual_seed(seed)
    d, t = 8 + 8 * seed, 20 + seed
    x, weight, dy = (torch.randn(s, generator=random) for s in ((2, d, t), (d, 4), (2, d, t)))
    leaf, w = x.double().requires_grad_(), weight.double().requires_grad_()
    y, _ = reference.causal_conv1d(leaf, w, activation="silu")
    exact = y.detach(), *torch.autograd.grad(y, (leaf, w), dy.double())
    x, weight, dy = (tensor.to(device) for tensor in (x, weight, dy))
    leaves = x.requires_grad_(), weight.requires_grad_()
    for _ in range(calls):
        y = ops.causal_conv1d(*leaves, activation="silu")
        for found, expected in zip((y, *torch.autograd.grad(y, leaves, dy)), exact, strict=True):
            assert found.device == torch.device(device)
            torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-4)
        with torch.no_grad():
            state = torch.zeros(2, d, 4, device=device)
            for token in range(t):
                step = ops.causal_conv1d_update(x[:, :, token].contiguous(), state, weight, activation="silu")
            torch.testing.assert_close(step.double().cpu(), exact[0][:, :, -1], rtol=1e-5, atol=1e-4)


def test_threads_of_different_shapes(device):
    in_threads(*(lambda seed=seed: work(device if device == "cpu" else "cuda:0", seed) for seed in range(4)))


def test_counters_of_threads_that_come_and_go():
    reset_routes()
    route = Route("short_conv", "causal_conv1d", "native", "cpu", None, "")
    for _ in range(3):
        in_threads(*[lambda: [record(route) for _ in range(100)]] * 4)
    assert route_counts() == {route: 1200}
    reset_routes()


def bad_bounds(device):
    cu_seqlens = torch.tensor([0, 9], dtype=torch.int32, device=device)
    ops.causal_conv1d(torch.ones(1, 8, 5, device=device), torch.ones(8, 4, device=device), cu_seqlens=cu_seqlens)


def test_devices_share_nothing(monkeypatch):
    """Two devices as the library sees them: facts, plans and status words of their own."""
    monkeypatch.setattr(environment, "_facts", {})
    found = [environment.facts(torch.device(name)) for name in ("cpu", "meta")]
    assert found[0].plans is not found[1].plans and found[0].status.address != found[1].status.address
    found[0].status.view[0] = pack(errors.SLOT_OUT_OF_RANGE, 0, 7)
    found[1].status.raise_pending()
    with pytest.raises(StateIndexError, match="an earlier call on cpu"):
        found[0].status.raise_pending()


two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two
def test_threads_on_devices_and_streams():
    """Each thread on a stream of its own, two on either device, while the current device stays 0."""

    def run(seed):
        device = f"cuda:{seed % 2}"
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            work(device, seed)
        stream.synchronize()

    in_threads(*(lambda seed=seed: run(seed) for seed in range(4)))
    assert torch.cuda.current_device() == 0
    check()


@pytest.mark.gpu
@two
def test_a_launch_waits_for_the_stream_of_its_own_device():
    """x is filled late on a stream of device 1, and the convolution comes after that; device 0 is current."""
    x, weight = torch.zeros(2, 64, 4096, device="cuda:1"), torch.ones(64, 4, device="cuda:1")
    ops.causal_conv1d(x, weight)
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.fill_(1)
        torch.cuda.set_device(0)
        y = ops.causal_conv1d(x, weight)
    stream.synchronize()
    assert (y[:, :, 3:] == 4).all()


@pytest.mark.gpu
@two
def test_an_error_belongs_to_its_device():
    for device in ("cuda:0", "cuda:1"):
        ops.causal_conv1d(torch.ones(1, 8, 5, device=device), torch.ones(8, 4, device=device))
    bad_bounds("cuda:1")
    torch.cuda.synchronize("cuda:1")
    bystander = torch.ones(1, 8, 5, device="cuda:0")
    ops.causal_conv1d(bystander, torch.ones(8, 4, device="cuda:0"))
    with pytest.raises(PackedMetadataError, match="an earlier call on cuda:1"):
        ops.causal_conv1d(bystander.to("cuda:1"), torch.ones(8, 4, device="cuda:1"))
    accel.check()


@pytest.mark.gpu
@two
def test_a_graph_of_the_second_device():
    """Its kernels were first called on device 0: their code has to be on device 1 before it is captured there."""
    x, weight = torch.randn(2, 40, 24), torch.randn(40, 3)
    expected = ops.causal_conv1d(x.to("cuda:0"), weight.to("cuda:0")).cpu()
    environment.facts(torch.device("cuda:1"))
    x, weight = x.to("cuda:1"), weight.to("cuda:1")
    with torch.cuda.device(1):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            y = ops.causal_conv1d(x, weight)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(y.cpu(), expected)


CONTEXTS = """
import torch
from accel import ops
with torch.cuda.device(1):
    x = torch.randn(2, 8, 20, device="cuda:1", requires_grad=True)
    ops.causal_conv1d(x, torch.randn(8, 4, device="cuda:1")).sum().backward()
    torch.cuda.synchronize()
print([torch._C._cuda_hasPrimaryContext(index) for index in range(torch.cuda.device_count())])
"""


@pytest.mark.gpu
@two
def test_a_rank_makes_no_context_on_the_devices_of_others():
    """Some hundred MiB each on every GPU of the machine, for every rank, if it did."""
    done = run_python(CONTEXTS)
    assert done.returncode == 0, done.stderr
    contexts = done.stdout.strip().strip("[]").split(", ")
    assert contexts[1] == "True" and set(contexts[:1] + contexts[2:]) == {"False"}
