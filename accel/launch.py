"""`python -m accel run`: an interpreter for the script, told by its environment what to switch on, and what it did.

The command becomes that interpreter (exec), so sys.argv, sys.path, `__main__`, the exit code and signals are the
script's own. accel/site/sitecustomize.py does the rest in there, with `switch_on` and `part`; accel/report.py writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel import matrix, routes
from accel.errors import AccelError
from accel.reasons import Reason
from accel.switch import accelerate

SITE = Path(__file__).parent / "site"
_states: dict[str, str] = {}  # of each target that this process wanted: empty when on, or why not

# a forked child counts its own calls; registered after the recorder's lock, which is free by then
os.register_at_fork(after_in_child=routes.reset_routes)


def environment_of(
    targets: str | Sequence[str], report: str, out: Path | None, title: str, env: Mapping[str, str]
) -> dict[str, str]:
    """The variables of the interpreter that runs the script.

    `targets`: "all", each switched on when its package is imported; or names, switched on when torch is, or the script
    ends there. ValueError for a name that is none, AccelError where no interpreter or no folder can be told.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise AccelError("run: expected an interpreter that reads its environment, got one with -E, -I or -S")
    table = matrix.load()
    explicit = targets != "all"
    packages: dict[str, list[str]] = {}
    if explicit:
        packages["torch"] = list(dict.fromkeys(table.canonical(name) for name in targets))
    else:
        for name, target in table.targets.items():
            row = target.ranges[-1]
            packages.setdefault((row.callables or row.holders)[0].module.partition(".")[0], []).append(name)
    rank = env.get("RANK")
    settings = {
        "targets": packages,
        "explicit": explicit,
        "report": report,
        "out": None if out is None else str(out.absolute()),
        "title": title,
        "pid": os.getpid(),
        "head": rank in (None, "0"),
        "folder": str(_folder(env)),
        "ranks": 1 if rank is None else int(env["WORLD_SIZE"]),
    }
    path = os.pathsep.join([str(SITE), *filter(None, [env.get("PYTHONPATH")])])
    return {**env, "ACCEL_RUN": json.dumps(settings), "PYTHONPATH": path}


def execute(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Become an interpreter with this one's options that runs `command`: a script or -m and a module, and arguments."""
    options = subprocess._args_from_interpreter_flags()  # what multiprocessing gives its children
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *options, *command], dict(env))


def _folder(env: Mapping[str, str]) -> Path:
    """Where the processes of a run leave their parts: a new folder, or under torchrun one that all ranks agree on."""
    if "RANK" not in env:
        return Path(tempfile.mkdtemp(prefix="accel-run-"))
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    agreed = [env.get(name, "") for name in names]
    shared = env.get("ACCEL_RUN_DIR")
    if not shared:
        agreed += [
            str(os.getuid()),
            str(os.getppid()),
        ]  # the run id is often "none"; the ranks of a node have one parent
    key = hashlib.sha256("\0".join(agreed).encode()).hexdigest()[:16]
    folder = Path(shared or tempfile.gettempdir()) / f"accel-run-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise AccelError(f"run: expected a folder of this user, got {folder}; ACCEL_RUN_DIR names another place")
    return folder


def switch_on(targets: Sequence[str], explicit: bool) -> None:
    """What the import of their package calls. Names that were given are a contract: without them the script ends."""
    try:
        accelerate(targets, verbose=False)
    except ImportError as error:
        if explicit:
            raise SystemExit(f"accel run: {error}") from None
        for name in targets:
            _states[name] = str(error).partition(f"{name}: ")[2] or str(error)
            routes.log.warning("%s is not accelerated: %s", name, _states[name])
    else:
        _states.update(dict.fromkeys(targets, ""))


def part() -> dict[str, Any]:
    """What this process has to say: its targets, its routes, and the first call of each kind that was not native."""
    firsts = [
        {**kind._asdict(), **first._asdict(), "fix": Reason(kind.reason).fix if kind.path == "fallback" else ""}
        for kind, first in routes.first_of_kinds().items()
    ]
    counted = [{**route._asdict(), "calls": calls} for route, calls in routes.route_counts().items()]
    return {"targets": dict(_states), "routes": counted, "firsts": firsts}
