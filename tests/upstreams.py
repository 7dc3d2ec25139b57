"""Real upstream releases, each in a folder of its own, and Python processes that see one of them.

One process can hold one FLA, so whatever needs a certain release runs in a subprocess with that folder in front.
The folders are kept in the user's cache (ACCEL_TEST_CACHE names another place) and are installed once.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from platformdirs import user_cache_dir

from accel.upkeep import releases

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("ACCEL_TEST_CACHE") or user_cache_dir("accel-tests"))

# An FLA adds every other `fla` folder on the path to its own, a flash-linear-attention of another version among them.
_ONE_FLA = """
import pkgutil, sys
pkgutil.extend_path = lambda path, name: path
import fla, pytest
assert fla.__version__ == {version!r}
sys.exit(pytest.main({options!r}))
"""


def fla(version: str) -> Path:
    """A folder with fla-core alone: modules and ops, no layers and models, nothing of transformers."""
    return releases.folders("fla-core", version, CACHE)[0]


def flash_linear_attention(version: str) -> Path:
    """A folder with fla-core and the layers and models above it, which import transformers."""
    wanted = [f"fla-core=={version}", f"flash-linear-attention=={version}"]
    return releases.install(wanted, CACHE / f"flash-linear-attention-{version}")


def causal_conv1d(version: str) -> Path:
    """A folder with causal-conv1d built from source without its extension: `causal_conv1d_cuda` has to be stubbed."""
    return releases.build("causal-conv1d", version, CACHE)


def mamba_ssm(version: str) -> Path:
    """A folder with mamba_ssm built from source without its extension: `selective_scan_cuda` has to be stubbed.

    It imports transformers: a folder of that has to be on the path too.
    """
    return releases.build("mamba-ssm", version, CACHE)


def transformers(version: str) -> Path:
    """A folder with transformers and what it imports: no model, nothing that reaches the network."""
    return releases.transformers(version, CACHE)


def run_python(
    code: str | Path,
    path: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    arguments: Sequence[str] = (),
) -> subprocess.CompletedProcess:
    """Run a snippet, or a script's file, with these folders first on the path; its output is captured as text."""
    program = [str(code), *arguments] if isinstance(code, Path) else ["-c", code, *arguments]
    folders = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_parity(script: Path, marker: str, path: Sequence[Path], **env: str) -> str:
    """Run a parity file with pytest in a process that sees these folders; its output, which is a failure's message."""
    return _pytest("import pytest, sys; sys.exit(pytest.main({options!r}))", script, marker, (), path, env)


def run_fla_parity(
    script: Path, version: str, marker: str, *selection: str, beside: Sequence[Path] = (), **env: str
) -> str:
    """`run_parity` with this FLA and no part of another one; `selection` is what else pytest is told."""
    return _pytest(_ONE_FLA, script, marker, selection, [fla(version), *beside], env, version=version)


def _pytest(
    code: str, script: Path, marker: str, selection: Sequence[str], path: Sequence[Path], env: Mapping, **words: str
) -> str:
    options = ["-q", "-m", marker, *selection, "-p", "no:cacheprovider", "--tb=short", "--show-capture=no", str(script)]
    # the test that asks is the one that counts as evidence; no untimed choice of FLA's autotuner outlives it
    env = {**env, "ACCEL_EVIDENCE": os.devnull, "FLA_CACHE_RESULTS": "0"}
    done = run_python(code.format(options=options, **words), path=path, env=env, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
