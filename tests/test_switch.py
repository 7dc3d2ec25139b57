"""Switching on and off: the contract on a made-up upstream, then the real FLA, each release in its own process."""

import functools
import logging
import sys
import threading
import types
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from upstreams import fla, run_python

from accel import environment, matrix, plan, switch
from accel.dispatch import Binding
from accel.matrix import MatrixError
from accel.switch import accelerate, accelerate_fla, accelerated, is_accelerated, restore
from accel.tables import Parameters, PatchPoint, Target, VersionRange

UPDATE = Parameters("x, cache, residual=None, weight=None, bias=None, activation=None")
SOURCE = f"def causal_conv1d_update({UPDATE}):\n    return x, cache\n"
VERSIONS = {"first": "1.0", "second": "1.0"}


@pytest.fixture
def upstream(monkeypatch, tmp_path):
    """Two made-up upstreams, `first` and `second`, of one callable each, that stand where the real targets do."""
    targets = {}
    for name in VERSIONS:
        (tmp_path / f"{name}.py").write_text(SOURCE)
        point = PatchPoint("causal_conv1d_update", name, "fla.causal_conv1d_update", UPDATE)
        row = VersionRange(SpecifierSet("==1.0"), (Version("1.0"),), (point,))
        targets[name] = Target(f"made up: {name}", name, (row,))
    table = replace(
        matrix.load(),
        targets=MappingProxyType(targets),
        planned=("later",),
        aliases=MappingProxyType({"one": "first"}),
    )
    versions = dict(VERSIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(matrix, "load", lambda: table)
    monkeypatch.setattr(environment, "distribution_version", versions.get)
    monkeypatch.setattr(plan, "_made", [])
    monkeypatch.setattr(switch, "_active", {})
    yield types.SimpleNamespace(table=table, versions=versions, folder=tmp_path)
    restore()
    for name in VERSIONS:
        sys.modules.pop(name, None)


def imported(name):
    return vars(__import__(name))["causal_conv1d_update"]


def binding(function):
    found = vars(function).get("__accel__")
    return found if isinstance(found, Binding) else None


def test_on_and_off(upstream):
    original = imported("first")
    assert not is_accelerated() and not is_accelerated("first")
    assert accelerate("first") == ("first",)
    wrapper = imported("first")
    assert binding(wrapper).live and wrapper.__wrapped__ is original
    assert is_accelerated() and is_accelerated("one") and not is_accelerated("second")
    restore("first")
    assert imported("first") is original and not binding(wrapper).live
    assert not is_accelerated()


def test_idempotent_and_revived(upstream):
    original = imported("first")
    accelerate("first")
    wrapper = imported("first")
    accelerate(["one", "first"])
    assert imported("first") is wrapper and wrapper.__wrapped__ is original
    restore()
    restore()
    assert imported("first") is original
    accelerate("first")
    assert imported("first") is wrapper and binding(wrapper).live


def test_each_target_is_restored_on_its_own(upstream):
    originals = {name: imported(name) for name in VERSIONS}
    assert accelerate() == ("first", "second")
    restore("first")
    assert imported("first") is originals["first"] and imported("second") is not originals["second"]
    assert is_accelerated("second") and not is_accelerated("first")
    restore()
    assert imported("second") is originals["second"]


def test_explicit_targets_are_all_or_nothing(upstream):
    original = imported("first")
    upstream.versions.pop("second")
    with pytest.raises(ImportError, match=r"second: second is not installed; later: not available in this version"):
        accelerate(["first", "second", "later"])
    assert imported("first") is original and not is_accelerated()
    accelerate("first")
    with pytest.raises(ImportError, match="second is not installed"):
        accelerate(["first", "second"])
    assert is_accelerated("first")


def test_all_takes_what_is_installed_and_reports_the_rest(upstream, caplog):
    upstream.versions.pop("second")
    with caplog.at_level(logging.INFO, logger="accel"):
        assert accelerate() == ("first",)
    assert [record.getMessage() for record in caplog.records] == [
        "second is not accelerated: second is not installed",
        "first is accelerated: causal_conv1d_update",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="accel"):
        accelerate("first", verbose=False)
        accelerate("first")  # already on: nothing new to say
    assert caplog.records == []


@pytest.mark.parametrize(
    "call", [accelerate, restore, is_accelerated, accelerate_fla, lambda name: accelerated(name).__enter__()]
)
def test_unknown_target(upstream, call):
    with pytest.raises(ValueError, match=r"first, second, conv1d, later \(aliases: one = first\) or 'all', got 'f"):
        call("frist")


def test_model_that_is_no_module(upstream):
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got dict"):
        accelerate("first", model={})


def test_model_instances_at_once_and_later(upstream):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.causal_conv1d_update = imported("first")

    early, late = Block(), Block()
    original = imported("first")
    accelerate("first", model=early)
    assert binding(early.causal_conv1d_update) and not binding(late.causal_conv1d_update)
    accelerate("first", model=torch.nn.Sequential(late))
    assert late.causal_conv1d_update is early.causal_conv1d_update
    restore()
    assert early.causal_conv1d_update is original and late.causal_conv1d_update is original


def test_block_restores_what_it_switched_on(upstream):
    originals = {name: imported(name) for name in VERSIONS}
    accelerate("first")
    with pytest.raises(KeyError), accelerated(["first", "second"]) as on:
        assert on == ("first", "second") and is_accelerated("second")
        raise KeyError
    assert is_accelerated("first") and not is_accelerated("second")
    assert imported("second") is originals["second"]
    with pytest.raises(ImportError), accelerated(["second", "later"]):
        pass
    assert imported("second") is originals["second"]


def test_replaced_before_us(upstream):
    import first

    original = first.causal_conv1d_update

    @functools.wraps(original)
    def foreign(*args, **kwargs):
        return "foreign"

    first.causal_conv1d_update = foreign
    with pytest.raises(ImportError, match=rf"replaced by foreign in {__file__} before accel came; strict=False"):
        accelerate("first")
    assert first.causal_conv1d_update is foreign
    accelerate("first", strict=False)
    assert binding(first.causal_conv1d_update).original is foreign
    restore()
    assert first.causal_conv1d_update is foreign


def test_replaced_after_us(upstream, caplog):
    import first

    accelerate("first")
    ours = first.causal_conv1d_update

    @functools.wraps(ours)
    def foreign(*args, **kwargs):
        return ours(*args, **kwargs)

    first.causal_conv1d_update = foreign
    restore()
    assert "first.causal_conv1d_update was replaced after accel swapped it" in caplog.text
    assert first.causal_conv1d_update is foreign and not binding(ours).live
    assert foreign("x", "cache") == ("x", "cache")
    # whoever patched takes the patch away: our wrapper comes to light, calls the original, and can be revived
    first.causal_conv1d_update = ours
    assert ours("x", "cache") == ("x", "cache")
    accelerate("first")
    assert first.causal_conv1d_update is ours and binding(ours).live
    restore()
    assert first.causal_conv1d_update is ours.__wrapped__


def test_version_outside_with_the_same_signatures(upstream, caplog):
    upstream.versions["first"] = "1.1"
    accelerate("first")
    accelerate("first")
    assert is_accelerated("first")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "first 1.1, outside the proven versions 1.0 to 1.0, has the signatures of the newest" in caplog.text


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_other_signatures_are_refused_with_the_difference(upstream, version):
    upstream.versions["first"] = version
    (upstream.folder / "first.py").write_text("def causal_conv1d_update(x, cache, weight): ...\n")
    message = (
        rf"first {version}.* causal_conv1d_update expected \(x, cache, residual=None.*, found \(x, cache, weight\)"
    )
    with pytest.raises(ImportError, match=message):
        accelerate("first")


@pytest.mark.parametrize(
    "source, message",
    [
        ("raise RuntimeError('no such driver')", "importing first fails with RuntimeError: no such driver"),
        ("import nothing_of_that_name", "importing first fails with ModuleNotFoundError: No module named 'nothing_of"),
        ("", "first has no causal_conv1d_update"),
        ("causal_conv1d_update = 3", "causal_conv1d_update has none that can be read"),
    ],
)
def test_an_upstream_that_cannot_serve_is_a_reason(upstream, source, message):
    (upstream.folder / "first.py").write_text(source)
    with pytest.raises(ImportError, match=message) as caught:
        accelerate("first")
    assert ("fails with" in message) is (caught.value.__cause__ is not None)
    assert accelerate() == ("second",)


def test_an_adapter_that_does_not_exist_is_an_error(upstream, monkeypatch):
    monkeypatch.setattr(plan, "ADAPTERS", {})
    with pytest.raises(MatrixError, match=r"targets\.first: adapter 'fla\.causal_conv1d_update' is none of"):
        accelerate()
    assert not is_accelerated()


def test_threads(upstream):
    original = imported("first")
    failures = []

    def loop():
        try:
            for _ in range(8):
                with accelerated("first"):
                    assert imported("first")("x", "cache") == ("x", "cache")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert imported("first") is original and not is_accelerated()


# What ShortConvolution's own code reads, and every other name a user may have: all of them hold the wrapper while the
# target is on, and the very original afterwards. m is fla.modules.
REACHED = {
    "0.4.1": {name: ["m.convolution"] for name in ("causal_conv1d", "causal_conv1d_update", "causal_conv1d_fwd")},
    "0.5.2": {
        "causal_conv1d": ["m.conv", "m.conv.causal_conv1d", "m.convolution"],
        "causal_conv1d_update": ["m.conv.triton", "m.conv.triton.ops", "m.convolution"],
        "causal_conv1d_update_states": ["m.conv.cuda.ops", "m.conv.triton", "m.conv.triton.ops", "m.convolution"],
    },
    "0.6.0": {
        "causal_conv1d": ["m.causal_conv1d", "m.causal_conv1d.ops", "m.conv", "m.convolution"],
        "causal_conv1d_update": ["m.causal_conv1d", "m.causal_conv1d.ops", "m.conv", "m.convolution"],
        "causal_conv1d_update_states": [
            "m.causal_conv1d",
            "m.causal_conv1d.backends.cuda.ops",
            "m.causal_conv1d.ops",
            "m.conv",
            "m.convolution",
        ],
    },
}

REAL = """
import importlib, inspect, pickle, sys, warnings
warnings.simplefilter("ignore")
import torch
from accel import matrix, record_routes
from accel.switch import accelerate, accelerate_fla, is_accelerated, restore
from accel.tables import look_up
import fla.modules
from fla.modules import ShortConvolution
from fla.modules.convolution import causal_conv1d_update as taken

REACHED = {reached}
row = next(row for row in matrix.load().targets["short_conv"].ranges if fla.__version__ in map(str, row.proven))
owners = {{point.attribute: importlib.import_module(point.module) for point in row.callables}}
held = lambda: {{point.attribute: look_up(owners[point.attribute], point.attribute) for point in row.callables}}
originals = held()
describe = lambda f: (inspect.signature(f), f.__name__, f.__qualname__, f.__module__, f.__doc__)
described = {{name: describe(function) for name, function in originals.items()}}

def snapshot():
    modules = {{key: module for key, module in sys.modules.copy().items() if key.partition(".")[0] == "fla"}}
    modules["ShortConvolution"] = ShortConvolution
    return {{(key, name): value for key, module in modules.items() for name, value in vars(module).items()}}

def holders(function):
    found = {{id(m): m.__name__ for k, m in sys.modules.items() if k.startswith("fla.")
              for value in vars(m).values() if value is function}}
    return sorted(name.replace("fla.modules", "m") for name in found.values())

before = snapshot()
assert accelerate_fla("short_conv") == ("short_conv",)
for name, wrapper in held().items():
    assert wrapper is not originals[name] and wrapper.__accel__.live, name
    assert describe(wrapper) == described[name], name
    assert pickle.loads(pickle.dumps(wrapper)) is wrapper, name
    assert holders(originals[name]) == [], (name, holders(originals[name]))
    if name in REACHED:
        assert holders(wrapper) == REACHED[name], (name, holders(wrapper))
assert taken is vars(owners["causal_conv1d_update"])["causal_conv1d_update"]

# what ShortConvolution's own methods call, prefill and then a step
layer = ShortConvolution(8, 4)
with torch.no_grad(), record_routes() as routes:
    _, cache = layer(torch.randn(1, 5, 8), output_final_state=True)
    layer(torch.randn(1, 1, 8), cache=cache, output_final_state=True)
assert [str(route) for route in routes] == ["native:cpu", "native:cpu"], routes
assert [route.callable for route in routes] == ["causal_conv1d", "causal_conv1d_update"], routes

assert accelerate("short_conv") == ("short_conv",)
restore()
assert taken is originals["causal_conv1d_update"]
after = snapshot()
assert before.keys() == after.keys()
changed = [key for key in before if before[key] is not after[key]]
assert changed == [], changed
print("done")
"""


@pytest.mark.parametrize("version", REACHED)
def test_the_real_fla(version):
    answer = run_python(REAL.format(reached=REACHED[version]), [fla(version)])
    assert answer.returncode == 0 and answer.stdout.endswith("done\n"), answer.stderr
