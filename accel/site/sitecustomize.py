"""What every Python process under `python -m accel run` does before its own code: the script's, and its children's.

Python imports it because its folder is on PYTHONPATH; a sitecustomize that was there before runs after it. Standard
library only: accel, and torch with it, is imported when the process itself imports what accel serves. So the script
sees no import that it has not made, and a child that has nothing to do with torch stays light.
"""

import atexit
import importlib
import importlib.util
import json
import os
import sys
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))
ROOM = os.path.dirname(HERE)


def load(name):
    """A module of accel, by its file: importing the package would import torch."""
    spec = importlib.util.spec_from_file_location(f"accel_{name}", os.path.join(ROOM, f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look there
    spec.loader.exec_module(module)
    return module


class Process:
    """One process of a run: switches targets on as their packages are imported, and leaves its part of the report."""

    def __init__(self, settings):
        self.settings = settings
        self.targets = settings["targets"]  # by the package whose import switches them on
        self.report = load("report")
        self.finalizer_known = False

    def begin(self):
        hook = load("imports").Hook(self.targets.__contains__, self.serve)
        hook.install()
        atexit.register(self.end)
        os.register_at_fork(before=self.before_fork)

    def serve(self, package, module):
        importlib.import_module("accel.launch").switch_on(self.targets[package], self.settings["explicit"])

    def before_fork(self):
        # multiprocessing ends a forked child with os._exit, after its own finalizers; those of the parent it forgets
        forks = sys.modules.get("multiprocessing.util")
        if forks is not None and not self.finalizer_known:
            self.finalizer_known = True
            forks.register_after_fork(self, Process.finalize_in_child)

    def finalize_in_child(self):
        sys.modules["multiprocessing.util"].Finalize(None, self.end, exitpriority=-100)

    def end(self):
        """Leave what this process has to say; the head of the run waits for the other ranks and reports."""
        launch = sys.modules.get("accel.launch")
        if launch is not None or os.getpid() == self.settings["pid"]:
            self.report.leave(self.settings, launch.part() if launch else None)


def make_way():
    """Off the path, and the next sitecustomize in this one's place."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "ACCEL_RUN" in os.environ:
    Process(json.loads(os.environ["ACCEL_RUN"])).begin()
make_way()
