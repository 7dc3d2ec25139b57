"""Runs a script on a GPU with nothing tuned: `python untuned.py SCRIPT ARGUMENTS...`.

Triton's autotuner compiles and times every configuration of every kernel, which for a model of FLA takes minutes. Here
it takes the smallest blocks that a kernel may have, which fit any GPU, and times nothing.
"""

import math
import runpy
import sys
from pathlib import Path

from triton.runtime import Autotuner, driver

from accel import triton_cpu

every = Autotuner.prune_configs


def smallest(tuner, kwargs):
    def size(config):
        return math.prod(value for value in config.kwargs.values() if isinstance(value, int) and value > 0)

    return [min(every(tuner, kwargs), key=size)]


if __name__ == "__main__":
    triton_cpu.install()  # where there is no GPU, and kernels are interpreted
    Autotuner.prune_configs = smallest
    driver.active.get_benchmarker = lambda: triton_cpu.first_wins
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
