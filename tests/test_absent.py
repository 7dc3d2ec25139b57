"""causal-conv1d that is not there: what stands in for it, what it serves, what it says, and that it goes again."""

import importlib
import importlib.util
import inspect
import logging
import pickle
import sys
import types

import pytest
import torch

from accel import accelerate, accelerated, environment, is_accelerated, matrix, ops, plan, record_routes, restore
from accel.ops import causal_conv1d, causal_conv1d_update, causal_conv1d_varlen_states
from accel.tables import Parameters

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("causal_conv1d") is not None, reason="causal-conv1d is installed here"
)

ROW = matrix.load().targets["causal_conv1d"].ranges[-1]
MODULES = {"causal_conv1d", *(point.module for point in ROW.callables)}
B, D, T, W = 2, 8, 7, 4


@pytest.fixture(autouse=True)
def switched_off(monkeypatch):
    # a stand-in is made once, and says for good what was lacking then
    monkeypatch.setattr(plan, "_vacant", {})
    monkeypatch.setattr(plan, "_standins", {})
    yield
    restore()
    environment.forget()


def there():
    return {name for name in sys.modules if name.partition(".")[0] == "causal_conv1d"}


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def test_it_imports_like_the_package():
    assert accelerate("causal_conv1d") == ("causal_conv1d",) and is_accelerated("causal_conv1d")
    import causal_conv1d as package
    import causal_conv1d.causal_conv1d_varlen
    from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function

    assert package.__accel__ is True and package.__version__ == "1.7.0+accel"
    assert there() == MODULES
    for name in MODULES:
        assert importlib.util.find_spec(name) is sys.modules[name].__spec__ and sys.modules[name].__accel__
        assert sys.modules[name].__spec__.name == sys.modules[name].__name__ == name
    assert importlib.util.find_spec("causal_conv1d.other") is None
    with pytest.raises(ImportError):
        importlib.import_module("causal_conv1d.other")
    assert package.cpp_functions.causal_conv1d_bwd_function is causal_conv1d_bwd_function
    assert package.causal_conv1d_interface.causal_conv1d_fn is causal_conv1d_fn
    assert not hasattr(package, "causal_conv1d_varlen_states")  # the package does not show it either
    assert causal_conv1d_fwd_function.__accel__.live and causal_conv1d_update.__accel__.live
    for point in ROW.callables:
        function = vars(sys.modules[point.module])[point.attribute]
        assert Parameters.of(function) == point.parameters
        assert (function.__module__, function.__qualname__) == (point.module, point.attribute)
        assert inspect.getdoc(function) and pickle.loads(pickle.dumps(function)) is function


def test_every_callable_serves():
    accelerate("causal_conv1d", verbose=False)
    found = {point.attribute: vars(sys.modules[point.module])[point.attribute] for point in ROW.callables}
    x, weight, bias, dy = tensors((B, D, T), (D, W), (D,), (B, D, T))
    with record_routes() as routes:
        y = found["causal_conv1d_fn"](x, weight, bias, activation="silu")
        into = found["causal_conv1d_fwd_function"](x, weight, bias, None, None, None, True)
        dx = torch.empty_like(x)
        gradients = found["causal_conv1d_bwd_function"](x, weight, bias, dy, None, None, None, dx, False, True)
        state, other = (torch.zeros(B, D, W) for _ in range(2))
        step = found["causal_conv1d_update"](x[:, :, 0].contiguous(), state, weight, bias, "silu")
        again = found["causal_conv1d_update_function"](x[:, :, :1], other, weight, bias, True, None, None)
        bounds = torch.tensor([0, 3, T], dtype=torch.int32)
        states = found["causal_conv1d_varlen_states"](x[0].t(), bounds, W)
    assert {str(route) for route in routes} == {"native:cpu"} and len(routes) == len(found) == 6
    assert {(route.target, route.callable) for route in routes} == {("causal_conv1d", name) for name in found}
    leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
    exact = causal_conv1d(*leaves, activation="silu")
    assert torch.equal(y, exact) and torch.equal(into, exact)
    assert gradients[0] is dx and gradients[3] is None
    for ours, theirs in zip(gradients[:3], torch.autograd.grad(exact, leaves, dy), strict=True):
        torch.testing.assert_close(ours, theirs)
    alone = causal_conv1d_update(x[:, :, 0].contiguous(), torch.zeros(B, D, W), weight, bias, activation="silu")
    assert torch.equal(step, alone)
    assert torch.equal(again[:, :, 0], step) and torch.equal(state, other)
    assert torch.equal(states, causal_conv1d_varlen_states(x[0].t(), bounds, W))


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (lambda: (tensors((B, D, T), (D, W), dtype=torch.float64), {}), TypeError, "x: expected torch.bfloat16"),
        (lambda: (tensors((B, D, T), (D, 9)), {}), NotImplementedError, "expected a width from 2 to 8, got 9"),
        (lambda: (tensors((B, D, T), (D + 1, W)), {}), ValueError, "weight: expected"),
        (
            lambda: (tensors((B, D, T), (D, W)), dict(activation="gelu")),
            ValueError,
            "activation: expected None, 'silu', 'swish'",
        ),
        (
            lambda: (tensors((B, D, T), (D, W)), dict(residual=None)),
            TypeError,
            "unexpected keyword argument 'residual'",
        ),
        (lambda: (tensors((B, D, T)), {}), TypeError, "missing 1 required positional argument: 'weight'"),
    ],
)
def test_a_call_that_nobody_serves_says_what_would(arguments, error, words):
    accelerate("causal_conv1d", verbose=False)
    args, kwargs = arguments()
    with record_routes() as routes, pytest.raises(error) as caught:
        sys.modules["causal_conv1d"].causal_conv1d_fn(*args, **kwargs)
    assert str(caught.value).startswith("causal_conv1d_fn: ") and words in str(caught.value)
    assert "causal-conv1d is not installed" in str(caught.value)
    assert [route.path for route in routes] == ["fallback"]


def test_disabled(monkeypatch):
    accelerate("causal_conv1d", verbose=False)
    monkeypatch.setenv("ACCEL_DISABLE", "1")
    environment.forget()
    with pytest.raises(NotImplementedError, match="ACCEL_DISABLE: expected unset"):
        sys.modules["causal_conv1d"].causal_conv1d_fn(*tensors((B, D, T), (D, W)))


def test_it_goes_and_comes_back():
    with accelerated("causal_conv1d", verbose=False):
        package = sys.modules["causal_conv1d"]
        taken = package.causal_conv1d_fn
    assert there() == set() and importlib.util.find_spec("causal_conv1d") is None
    arguments = tensors((B, D, T), (D, W))
    with pytest.raises(
        ImportError, match=r"causal_conv1d_fn: causal-conv1d is not installed, and accel, .* switched off"
    ):
        taken(*arguments)
    with accelerated("causal_conv1d", verbose=False):
        assert sys.modules["causal_conv1d"] is package and package.causal_conv1d_fn is taken
        assert torch.equal(taken(*arguments), ops.causal_conv1d(*arguments))
    assert there() == set()


def test_who_took_a_callable_keeps_it(monkeypatch):
    """A script's own name is nothing that an upstream would test for None: it keeps what it took, which says why."""
    script = types.ModuleType("acc_script")
    monkeypatch.setitem(sys.modules, script.__name__, script)
    with accelerated("causal_conv1d", verbose=False):
        exec("from causal_conv1d import causal_conv1d_fn", vars(script))
    with pytest.raises(ImportError, match="switched off"):
        script.causal_conv1d_fn(*tensors((B, D, T), (D, W)))


def test_what_is_installed_is_no_wish_for_a_stand_in(caplog):
    accelerate()
    assert not is_accelerated("causal_conv1d")
    assert "causal_conv1d is not accelerated: causal-conv1d is not installed" in caplog.text


def test_it_is_said_once(caplog):
    with caplog.at_level(logging.INFO, logger="accel"):
        accelerate("causal_conv1d")
    (record,) = caplog.records
    assert record.levelname == "INFO" and "(accel stands in for causal_conv1d)" in record.getMessage()


def package_at(folder, source, version=None):
    (folder / "causal_conv1d").mkdir()
    (folder / "causal_conv1d" / "__init__.py").write_text(source)
    (folder / "causal_conv1d" / "half.py").write_text("")
    if version is not None:
        (folder / f"causal_conv1d-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: causal-conv1d\nVersion: {version}\n"
        (folder / f"causal_conv1d-{version}.dist-info" / "METADATA").write_text(text)


def test_a_package_built_for_another_torch(tmp_path, monkeypatch, caplog):
    """It cannot be imported: accel stands in for it, says so, and gives its place back."""
    package_at(tmp_path, "import causal_conv1d.half\nraise ImportError('undefined symbol: _ZN3c104cuda')", "1.7.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    environment.forget()
    accelerate("causal_conv1d")
    assert (
        "causal-conv1d 1.7.0: importing causal_conv1d.causal_conv1d_interface fails with ImportError: undefi"
        in caplog.text
    )
    assert "accel stands in for it" in caplog.text
    package = importlib.import_module("causal_conv1d")
    with pytest.raises(TypeError, match="importing .* fails with ImportError: undefined symbol"):
        package.causal_conv1d_fn(*tensors((B, D, T), (D, W), dtype=torch.float64))
    package.causal_conv1d_fn(*tensors((B, D, T), (D, W)))
    restore()
    assert "causal_conv1d" not in sys.modules
    with pytest.raises(ImportError, match="undefined symbol"):
        importlib.import_module("causal_conv1d")
    for name in there():
        del sys.modules[name]


def test_a_package_of_no_known_version(tmp_path, monkeypatch):
    package_at(tmp_path, "causal_conv1d_fn = None")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="causal_conv1d can be imported, but no distribution causal-conv1d says its"):
        accelerate("causal_conv1d")
    assert there() == set()


def test_what_somebody_else_put_there_stays():
    accelerate("causal_conv1d", verbose=False)
    other = sys.modules["causal_conv1d"] = types.ModuleType("causal_conv1d")
    try:
        restore()
        assert sys.modules["causal_conv1d"] is other and there() == {"causal_conv1d"}
    finally:
        del sys.modules["causal_conv1d"]
