"""Swapping by identity, on modules made here: nothing of convolutions, no upstream."""

import functools
import gc
import importlib
import os
import sys
import threading
import types
import weakref

import pytest
import torch

from accel import patch
from accel.patch import Swap


def original(x):
    return ("original", x)


def replacement(x):
    return ("replacement", x)


ORIGINAL, REPLACEMENT = [original], [replacement]  # in lists: what the walk finds in this module is swapped too


@pytest.fixture
def swap():
    swap = Swap(ORIGINAL[0], REPLACEMENT[0])
    yield swap
    patch.release([swap])


@pytest.fixture
def module(monkeypatch):
    """Makes modules in sys.modules that are gone after the test."""

    def make(name, kind=types.ModuleType, **namespace):
        made = kind(name)
        vars(made).update(namespace)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


def is_original(found):
    return found is ORIGINAL[0]


def is_replacement(found):
    return found is REPLACEMENT[0]


def test_every_name_in_every_module(swap, module):
    owner = module("acc_owner", function=original)
    user = module("acc_user", function=original, other_name=original, unrelated=len)
    before = dict(vars(user))
    patch.engage([swap])
    assert is_replacement(owner.function) and is_replacement(user.function) and is_replacement(user.other_name)
    assert user.unrelated is len
    assert patch.release([swap]) == []
    assert is_original(owner.function) and vars(user) == before


def test_import_as_in_this_very_module(swap):
    globals()["taken_as"] = ORIGINAL[0]
    patch.engage([swap])
    assert is_replacement(globals()["taken_as"])
    patch.release([swap])
    assert is_original(globals().pop("taken_as"))


def test_one_module_under_many_names_is_written_once(swap, module, monkeypatch):
    owner = module("acc_owner", function=original)
    for alias in ("acc_alias", "acc_alias.ops"):
        monkeypatch.setitem(sys.modules, alias, owner)
    patch.engage([swap])
    assert [str(place) for place in swap.places].count("acc_owner.function") == 1
    assert len({str(place) for place in swap.places}) == len(swap.places)
    patch.release([swap])
    assert is_original(owner.function)


def test_synthetic_module_with_copied_references(swap, module):
    module("acc_owner", function=original)
    synthetic = module("acc_synthetic", function=original, __path__=[], __spec__=None)
    patch.engage([swap])
    assert is_replacement(synthetic.function)
    patch.release([swap])
    assert is_original(synthetic.function)


def test_function_and_submodule_of_one_name(swap, module):
    package = module("acc_package", __path__=[])
    submodule = module("acc_package.function", function=original)
    package.function = ORIGINAL[0]  # the function hides the submodule
    patch.engage([swap])
    assert is_replacement(package.function) and is_replacement(submodule.function)
    assert importlib.import_module("acc_package.function") is submodule


def test_class_attributes(swap, module):
    class Layer:
        function = ORIGINAL[0]
        static = staticmethod(ORIGINAL[0])

        def method(self, x):
            return self.static(x)

    class Other(Layer):
        static = staticmethod(ORIGINAL[0])

    module("acc_layers", Layer=Layer, Other=Other, Again=Layer)
    before = dict(vars(Layer)), dict(vars(Other))
    patch.engage([swap])
    assert is_replacement(Layer.function) and is_replacement(Layer.static) and is_replacement(Other.static)
    assert isinstance(vars(Layer)["static"], staticmethod)
    assert Layer().method(1) == ("replacement", 1)
    patch.engage([swap])
    patch.release([swap])
    after = dict(vars(Layer)), dict(vars(Other))
    for old, new in zip(before, after, strict=True):
        assert all(old[name] is new[name] for name in ("function", "static") if name in old)


class Block(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.unrelated = len


def test_instances_of_a_model(swap):
    model = torch.nn.Sequential(Block(original), torch.nn.Sequential(Block(original)))
    untouched = Block(original)
    patch.engage([swap], model)
    assert is_replacement(model[0].function) and is_replacement(model[1][0].function)
    assert is_original(untouched.function)
    patch.engage([swap], torch.nn.Sequential(untouched))
    assert is_replacement(untouched.function)
    patch.release([swap])
    assert all(is_original(block.function) for block in (model[0], model[1][0], untouched))


def test_an_instance_built_after_the_swap_is_restored_when_it_was_given(swap, module):
    owner = module("acc_owner", function=original)
    patch.engage([swap])
    model = Block(owner.function)
    patch.engage([swap], model)
    patch.engage([swap], model)
    assert [place.name for place in swap.places if place.holder() is model] == ["function"]
    patch.release([swap])
    assert is_original(model.function)


def test_a_model_is_not_kept_alive(swap):
    model = Block(original)
    alive = weakref.ref(model)
    patch.engage([swap], model)
    del model
    gc.collect()
    assert alive() is None
    assert patch.release([swap]) == []


def test_modules_imported_later(swap, module, tmp_path, monkeypatch):
    module("acc_owner", function=original)
    (tmp_path / "acc_later.py").write_text("from acc_owner import function as taken\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    patch.engage([swap])
    later = importlib.import_module("acc_later")
    monkeypatch.delitem(sys.modules, "acc_later")
    monkeypatch.setitem(sys.modules, "acc_later", later)
    assert is_replacement(later.taken)
    patch.release([swap])
    assert is_original(later.taken)


def test_twice_on_and_once_off(swap, module):
    owner = module("acc_owner", function=original)
    patch.engage([swap])
    patch.engage([swap])
    assert is_replacement(owner.function)
    patch.release([swap])
    assert is_original(owner.function)
    assert patch.release([swap]) == []


def test_swaps_are_restored_one_by_one(swap, module):
    def second():
        pass

    owner = module("acc_owner", function=original, second=second)
    other = Swap(second, lambda: None)
    patch.engage([swap, other])
    patch.release([swap])
    assert is_original(owner.function) and owner.second is other.replacement
    patch.release([other])
    assert owner.second is second


def test_a_later_foreign_patch_stays_and_is_reported(swap, module):
    owner = module("acc_owner", function=original)
    user = module("acc_user", function=original)
    patch.engage([swap])

    def foreign(x):
        return x

    owner.function = foreign
    del user.function
    assert patch.release([swap]) == ["acc_owner.function"]
    assert owner.function is foreign
    assert not hasattr(user, "function")


def test_a_foreign_patch_taken_back_by_its_owner_is_no_displacement(swap, module):
    owner = module("acc_owner", function=original)
    patch.engage([swap])
    owner.function = ORIGINAL[0]
    assert patch.release([swap]) == []


def test_all_or_nothing(swap, module, monkeypatch):
    class Sealed(type):
        pass

    owner = module("acc_owner", function=original)
    layer = module("acc_zz_last", Layer=Sealed("Layer", (), {"function": original}))
    write = patch._write

    def failing(holder, name, found, wanted):
        if holder is layer.Layer and wanted is REPLACEMENT[0]:
            raise TypeError("sealed")
        return write(holder, name, found, wanted)

    monkeypatch.setattr(patch, "_write", failing)
    with pytest.raises(TypeError, match="sealed"):
        patch.engage([swap])
    assert is_original(owner.function) and is_original(layer.Layer.function)
    assert swap.places == []


def test_a_walk_resolves_nothing(swap, module):
    """Lazy modules import on attribute access, proxies on `__class__`, and both on `__dict__`."""

    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"resolved {name}")

        def __setattr__(self, name, value):
            raise AssertionError(f"wrote {name}")

    class Proxy:
        def __getattribute__(self, name):
            raise AssertionError(f"resolved {name}")

        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = None

    lazy = Lazy("acc_lazy")
    namespace = object.__getattribute__(lazy, "__dict__")
    namespace.update(function=ORIGINAL[0], proxy=Proxy())
    sys.modules["acc_lazy"] = lazy
    sys.modules["acc_proxy"] = Proxy()
    try:
        patch.engage([swap])
        assert is_replacement(namespace["function"])
        patch.release([swap])
        assert is_original(namespace["function"])
    finally:
        del sys.modules["acc_lazy"], sys.modules["acc_proxy"]


@pytest.mark.parametrize("entry", [None, 3, len, object(), type("Slots", (), {"__slots__": ()})(), torch.nn.Module])
def test_odd_entries_of_sys_modules(swap, module, monkeypatch, entry):
    owner = module("acc_owner", function=original)
    monkeypatch.setitem(sys.modules, "acc_odd", entry)
    patch.engage([swap])
    assert is_replacement(owner.function)


def test_threads_switching_on_and_off(module):
    owner = module("acc_owner", function=original)
    swaps = [Swap(original, replacement)]
    stop = threading.Event()
    failures = []

    def guarded(work):
        def loop():
            try:
                while not stop.is_set():
                    work()
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=loop)

    def switch():
        patch.engage(swaps)
        patch.release(swaps)

    def call():
        assert owner.function(1)[1] == 1

    def churn():
        name = f"acc_churn_{threading.get_ident()}"
        sys.modules[name] = types.ModuleType(name)
        for index in range(100):
            setattr(sys.modules[name], f"name_{index}", index)
        del sys.modules[name]

    threads = [guarded(work) for work in (switch, switch, call, churn, churn)]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert is_original(owner.function)


def test_foreign_links():
    def wrapper():
        pass

    @torch.compiler.disable
    def disabled():
        pass

    package = __name__.partition(".")[0]
    assert patch.foreign_link(wrapper, [package]) is None
    assert patch.foreign_link(disabled, [package, "torch"]) is None
    assert "eval_frame" in patch.foreign_link(disabled, [package])
    assert patch.foreign_link(wrapper, ["torch"]) == f"wrapper in {__file__}"
    assert patch.foreign_link(functools.wraps(os.path.join)(lambda: None), [package]).startswith("join in ")
    assert patch.foreign_link(functools.partial(wrapper), [package]) == "partial of functools"
    assert patch.foreign_link(len, [package]) == "builtin_function_or_method of builtins"
    assert patch.foreign_link(torch.nn.Identity(), ["torch"]) is None
    # a chain that bites its tail
    wrapper.__wrapped__ = wrapper
    assert patch.foreign_link(wrapper, [package]) is None
