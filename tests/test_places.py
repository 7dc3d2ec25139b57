"""Places that are filled, modules imported later, targets that need others: on upstreams made here."""

import importlib
import importlib.machinery
import inspect
import sys
import textwrap
import threading
import types
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from accel import environment, holders, matrix, plan, switch
from accel.imports import Hook
from accel.switch import accelerate, accelerated, is_accelerated, restore
from accel.tables import Closure, Holder, Matrix, Parameters, PatchPoint, StandIn, Target, VersionRange

STEP = Parameters("x, cache, residual=None, weight=None, bias=None, activation=None")
SEQUENCE = Parameters("x, state_len, initial_state=None, cu_seqlens=None")
SOURCES = {
    # the package that may be missing
    "acc_conv": f"def step({STEP}):\n    return 'package'\ndef sequence({SEQUENCE}):\n    return 'package'\n",
    # an upstream that takes its functions, or None, at import, and tests them for None
    "acc_user": """
        try:
            from acc_conv import sequence, step
        except ImportError:
            sequence = step = None
        scan = object()
        pair = None
        cache = {"other": 1}
        fast = all((step, sequence, scan))
        class Layer:
            def __init__(self):
                self.step = step
        remembered = []
        def available():
            return bool(remembered)
        available.cache_clear = remembered.clear
        """,
    # an upstream that wraps its own function around whatever it finds at import
    "acc_models.first": f"""
        def own({STEP}):
            return "own"
        def build(own):
            try:
                from acc_conv import step as implementation
            except ImportError:
                implementation = own
            is_new, names = implementation is not own, tuple("x cache".split())
            def hub({STEP}):
                return (own if implementation is None else implementation)(x, cache), is_new, names
            return hub
        hub = build(own)
        def step({STEP}):
            return "first"
        """,
    "acc_models.second": "from acc_models.first import step\ndef sequence(x):\n    return 'second'\n",
}
USER = tuple(
    Holder(*place)
    for place in (
        ("acc_user", "step"),
        ("acc_user", "sequence"),
        ("acc_user", "absent_in_this_release", "callable", ("step",)),
        ("acc_user", "pair", "tuple", ("step", "sequence")),
        ("acc_user", "cache", "package", ("acc_conv",), "conv"),
        ("acc_user", "fast", "all", ("step", "sequence", "scan")),
    )
)
CLOSURE = Closure("acc_models.*", "hub", "implementation", "own", "is_new", "names")


def row(*callables, **more):
    return VersionRange(SpecifierSet("==1.0"), (Version("1.0"),), callables, **more)


@pytest.fixture
def upstream(monkeypatch, tmp_path):
    """Targets conv (with a stand-in), user and models (both need conv) in the place of the real ones."""
    for name, source in SOURCES.items():
        file = tmp_path / (name.replace(".", "/") + ".py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(source))
    step = PatchPoint("step", "acc_conv", "fla.causal_conv1d_update", STEP)
    sequence = PatchPoint("sequence", "acc_conv", "fla.causal_conv1d_update_states", SEQUENCE)
    pattern = PatchPoint("step", "acc_models.*", "fla.causal_conv1d_update", STEP)
    other = PatchPoint("sequence", "acc_models.*", "fla.causal_conv1d_update_states", SEQUENCE)
    targets = {
        "conv": Target("", "conv", (row(step, sequence),), StandIn(Version("1.0+ours"), ())),
        "user": Target("", "user", (row(needs=("conv",), holders=USER, caches=("acc_user.available",)),)),
        "models": Target("", "models", (row(pattern, other, needs=("conv", "gone"), closures=(CLOSURE,)),)),
        "gone": Target("", "gone", (row(step),)),
    }
    nothing = MappingProxyType({})
    table = Matrix(
        MappingProxyType(targets),
        modules=(),
        planned=(),
        aliases=nothing,
        architectures=None,
        operations=nothing,
        faults=(),
    )
    versions = {"conv": "1.0", "user": "1.0", "models": "1.0"}
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(matrix, "load", lambda: table)
    monkeypatch.setattr(environment, "distribution_version", versions.get)
    for where, name, empty in (
        (plan, "_made", []),
        (plan, "_vacant", {}),
        (plan, "_standins", {}),
        (switch, "_active", {}),
        (switch, "_filled", []),
    ):
        monkeypatch.setattr(where, name, empty)
    finders = list(sys.meta_path)

    def take_away():
        versions.pop("conv", None)
        (tmp_path / "acc_conv.py").unlink()
        importlib.invalidate_caches()

    yield types.SimpleNamespace(take_away=take_away, versions=versions, folder=tmp_path)
    restore()
    assert list(sys.meta_path) == finders
    for name in [name for name in sys.modules if name.startswith("acc_")]:
        del sys.modules[name]


@pytest.fixture
def absent(upstream):
    upstream.take_away()
    return upstream


def imported(name):
    return importlib.import_module(name)


def snapshot(*names):
    return {(name, key): value for name in names for key, value in vars(sys.modules[name]).items()}


def assert_same(before, after):
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []


def live(function):
    return function.__accel__.live


def test_places_are_filled_and_emptied(absent):
    user = imported("acc_user")
    before, entries = snapshot("acc_user"), dict(user.cache)
    assert user.step is None and user.fast is False
    assert accelerate("user") == ("user",) and is_accelerated("user") and not is_accelerated("conv")
    package = sys.modules["acc_conv"]
    assert live(user.step) and user.step is package.step and user.sequence is package.sequence
    assert user.pair == (user.step, user.sequence) and user.fast is True
    assert user.cache == {"other": 1, "conv": package} and not hasattr(user, "absent_in_this_release")
    filled = snapshot("acc_user")
    accelerate(["user", "conv"])
    assert_same(filled, snapshot("acc_user"))
    restore("conv")
    assert_same(filled, snapshot("acc_user"))
    assert sys.modules["acc_conv"] is package
    restore()
    assert_same(before, snapshot("acc_user"))
    assert user.cache == entries and "acc_conv" not in sys.modules


def test_the_package_is_there_and_its_names_are_none(upstream):
    """As Transformers has them on a machine without CUDA: filled with what the package's own callables became."""
    user, conv = imported("acc_user"), imported("acc_conv")
    assert user.step is conv.step
    user.step, user.fast = None, False
    before = snapshot("acc_user", "acc_conv")
    accelerate("user")
    assert user.step is conv.step and live(user.step) and user.sequence is conv.sequence and user.fast is True
    assert user.cache["conv"] is conv
    restore()
    assert_same(before, snapshot("acc_user", "acc_conv"))
    assert user.step is None and "conv" not in user.cache


def test_originals_in_a_tuple(upstream):
    """No walk by identity sees into a tuple: the rule for it does, and the very tuple comes back."""
    user, conv = imported("acc_user"), imported("acc_conv")
    held = user.pair = (conv.step, None)
    accelerate("user")
    assert user.pair == (conv.step, conv.sequence) and live(user.pair[0]) and live(user.pair[1])
    restore()
    assert user.pair is held
    user.pair = (conv.sequence, conv.step)  # another order: somebody else's
    accelerate("user")
    assert user.pair[0].__name__ == "sequence" and not hasattr(user.pair[0], "__accel__")


def test_a_version_of_which_nothing_can_be_compared(upstream, caplog):
    """Outside the proven versions every signature has to match: without one there is no match."""
    upstream.versions["user"] = "2.0"
    with pytest.raises(
        ImportError, match=r"user: user 2.0, outside the proven versions .* has no signatures that could"
    ):
        accelerate("user")
    assert accelerate() == ("conv", "models")


@pytest.mark.parametrize("names", [["user"], ["conv"], ["user", "conv"], ["conv", "user"]])
def test_a_module_imported_meanwhile(absent, names):
    """With the target on it is filled; without, it takes from the stand-in what it must not keep."""
    accelerate(names)
    user = imported("acc_user")
    assert live(user.step) and user.fast is True
    assert user.__spec__.loader is user.__loader__ and type(user.__loader__) is importlib.machinery.SourceFileLoader
    assert inspect.getsource(user.Layer).startswith("class Layer")
    restore()
    assert user.step is None and user.sequence is None and user.fast is False and user.pair is None
    assert user.cache == {"other": 1}


def test_a_module_imported_while_the_package_is_there(upstream):
    accelerate("user")
    user, conv = imported("acc_user"), imported("acc_conv")
    assert live(user.step) and user.step is conv.step
    restore()
    assert user.step is conv.step and not hasattr(user.step, "__accel__") and user.fast is True


def test_instances_that_hold_none(absent):
    user = imported("acc_user")
    user.Layer.modules = lambda self: [self]
    early, untouched = user.Layer(), user.Layer()
    accelerate("user", model=early)
    late, unknown = user.Layer(), user.Layer()
    accelerate("user", model=late)
    accelerate("user", model=late)
    assert early.step is late.step is user.step and untouched.step is None
    restore()
    assert early.step is None and late.step is None
    with pytest.raises(ImportError, match="step: conv is not installed"):
        unknown.step(1, 2)


def test_what_somebody_else_put_there_stays_and_is_reported(absent, caplog):
    user = imported("acc_user")
    accelerate("user")
    mine = user.step = object()
    del user.cache
    user.pair = None
    restore()
    assert user.step is mine and user.sequence is None and not hasattr(user, "cache")
    assert "acc_user.step was replaced after accel swapped it" in caplog.text
    assert "acc_user.pair" not in caplog.text and "acc_user.sequence" not in caplog.text


def test_caches_of_what_is_installed_are_cleared(absent):
    user = imported("acc_user")
    for turn in (lambda: accelerate("user"), restore):
        user.remembered.append("an answer")
        turn()
        assert user.remembered == []


def test_all_or_nothing(absent, monkeypatch):
    user = imported("acc_user")
    before = snapshot("acc_user")
    fill, seen = holders.fill, []

    def failing(rules, holder, callables):
        seen.append(holder)
        filled = fill(rules, holder, callables)
        switch._filled.extend(filled)
        raise RuntimeError("halfway")

    monkeypatch.setattr(holders, "fill", failing)
    with pytest.raises(RuntimeError, match="halfway"):
        accelerate("user")
    assert seen == [user] and not is_accelerated()
    assert_same(before, snapshot("acc_user"))
    assert "acc_conv" not in sys.modules and user.cache == {"other": 1}


def test_a_target_that_needs_one_that_is_refused(upstream):
    (upstream.folder / "acc_conv.py").write_text("def step(x): ...\ndef sequence(x): ...\n")
    with pytest.raises(ImportError, match=r"user: it needs conv: conv 1.0 has other signatures: step expected"):
        accelerate("user")
    assert not is_accelerated()


def test_all_stands_in_for_what_a_target_needs(absent, caplog):
    for _ in range(2):
        assert accelerate() == ("conv", "user", "models")
    assert is_accelerated("conv") and "acc_conv" in sys.modules
    assert [record.getMessage() for record in caplog.records] == ["gone is not accelerated: gone is not installed"] * 2
    restore()
    absent.versions.clear()
    assert accelerate() == () and "acc_conv" not in sys.modules


def test_a_package_that_cannot_be_imported_is_stood_in_for_once(upstream):
    (upstream.folder / "acc_conv.py").write_text("raise ImportError('undefined symbol')")
    accelerate("conv")
    package = imported("acc_conv")
    step = package.step
    user = imported("acc_user")
    accelerate("user")
    assert user.step is package.step is step and not hasattr(step.__wrapped__, "__accel__")
    restore("conv")
    assert sys.modules["acc_conv"] is package and live(step)
    restore()
    assert user.step is None and "acc_conv" not in sys.modules


def test_a_target_that_needs_one_of_an_unknown_version(upstream, caplog):
    """It does without, and says so."""
    table = matrix.load()
    (models,) = table.targets["models"].ranges
    wanting = replace(table.targets["models"], ranges=(replace(models, needs=("conv", "user")),))
    table = replace(table, targets=MappingProxyType({**table.targets, "models": wanting}))
    upstream.versions["user"] = "2.0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "load", lambda: table)
        assert accelerate("models") == ("models",)
        restore()
    assert "models: user is left out: user 2.0, outside the proven versions" in caplog.text


def test_patterns(absent, caplog):
    """What a matching module defines is swapped, its own function being the fallback; what it only took follows."""
    first = imported("acc_models.first")
    before, own = snapshot("acc_models.first"), first.step
    assert accelerate("models") == ("models",)
    assert live(first.step) and first.step.__wrapped__ is own and first.step.__accel__.target == "models"
    assert first.step("x", "cache") == "first"  # declined: no tensors
    second = imported("acc_models.second")
    assert second.step is first.step and second.sequence(1) == "second"
    assert caplog.text.count("acc_models.second is left alone: sequence expected") == 1
    third = types.ModuleType("acc_models.third")
    third.step = torch.nn.Identity()
    sys.modules["acc_models.third"] = third
    kernel = third.step
    accelerate("models")
    assert third.step is kernel
    restore()
    assert_same(before, snapshot("acc_models.first"))
    assert second.step is own


def test_a_module_of_a_pattern_imported_meanwhile(absent):
    accelerate("models")
    first = imported("acc_models.first")
    assert live(first.step)
    restore()
    assert first.step("x", "cache") == "first" and not hasattr(first.step, "__accel__")


@pytest.mark.parametrize("names", [["models"], ["conv"], ["conv", "models"]])
def test_a_closure_that_captured_the_stand_in(absent, names):
    accelerate(names)
    first = imported("acc_models.first")
    restore()
    assert first.hub(1, 2) == ("own", False, tuple(inspect.signature(first.own).parameters))


@pytest.mark.parametrize("names", [["models"], ["conv"]])
def test_a_closure_that_captured_the_packages(upstream, names):
    accelerate(names)
    first = imported("acc_models.first")
    restore()
    assert first.hub(1, 2) == ("package", True, ("x", "cache"))
    (cell,) = [cell for cell in first.hub.__closure__ if cell.cell_contents is imported("acc_conv").step]
    assert not hasattr(cell.cell_contents, "__accel__")


def test_the_hook_sees_what_it_wants_and_stays_out_of_the_rest(upstream, monkeypatch):
    served, finders = [], list(sys.meta_path)
    hook = Hook({"acc_user", "acc_missing"}.__contains__, lambda name, module: served.append((name, module.scan)))
    hook.install()
    hook.install()
    assert sys.meta_path == [hook, *finders]
    imported("acc_conv")
    user = imported("acc_user")
    with pytest.raises(ModuleNotFoundError):
        imported("acc_missing")
    assert served == [("acc_user", user.scan)]
    monkeypatch.setattr(sys, "meta_path", [*finders, hook])  # somebody else has moved it
    hook.remove()
    hook.remove()
    assert sys.meta_path == finders


def test_two_hooks_that_ask_each_other(upstream):
    served = []
    hooks = [Hook("acc_user".__eq__, lambda name, module, at=at: served.append(at)) for at in range(2)]
    for hook in hooks:
        hook.install()
    try:
        imported("acc_user")
    finally:
        for hook in hooks:
            hook.remove()
    assert sorted(served) == [0, 1]


def test_an_import_lives_whatever_the_hook_does(upstream, caplog):
    def served(name, module):
        raise KeyError(name)

    hook = Hook("acc_user".__eq__, served)
    hook.install()
    try:
        assert imported("acc_user").scan
    finally:
        hook.remove()
    assert "acc_user was imported, and is not accelerated" in caplog.text
    (upstream.folder / "acc_broken.py").write_text("raise RuntimeError('its own')")
    broken = Hook("acc_broken".__eq__, served)
    broken.install()
    try:
        with pytest.raises(RuntimeError, match="its own"):
            imported("acc_broken")
    finally:
        broken.remove()
    assert "acc_broken" not in sys.modules


def test_importing_in_one_thread_while_another_switches(absent):
    """The hook takes the lock of a switch while it holds an import lock; a switch imports before it takes its own."""
    failures, stop = [], threading.Event()

    def guarded(work):
        def loop():
            try:
                while not stop.is_set():
                    work()
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=loop, daemon=True)

    def toggle():
        with accelerated(["user", "models"], verbose=False):
            pass

    def churn():
        for name in ("acc_user", "acc_models.first"):
            sys.modules.pop(name, None)
            imported(name)

    threads = [guarded(toggle), guarded(toggle), guarded(churn)]
    for thread in threads:
        thread.start()
    stop.wait(1.5)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert failures == [] and not any(thread.is_alive() for thread in threads)
    restore()
    assert imported("acc_user").step is None
