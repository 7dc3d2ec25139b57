"""Upstream releases, each in a folder of its own, installed by pip without their dependencies and kept.

A release whose setup.py would build an extension is built from source without it: what it imports has to be stubbed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from filelock import FileLock
from packaging.version import Version
from platformdirs import user_cache_path

from accel.errors import AccelError

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# what each release needs and an environment with torch may not have; any other takes what the newest one here does
TRANSFORMERS = {
    "4.57.6": ["huggingface_hub<1", "tokenizers<=0.23.0", "requests", "urllib3", "charset_normalizer"],
    "5.6.2": ["huggingface_hub<2", "tokenizers<=0.23.0", "httpx", "httpcore", "anyio", "h11", "click"],
    "5.24.0": ["huggingface_hub<3", "tokenizers<0.24", "httpx2", "httpcore2", "anyio", "h11", "click", "truststore"],
}
MAMBA_NEEDS = "4.57.6"  # mamba_ssm imports transformers


class ReleaseError(AccelError):
    """A release that cannot be had here; the message has pip's last words."""


def kept() -> Path:
    """Where the command keeps releases: `releases` in ACCEL_CACHE_DIR or in the user's cache folder."""
    chosen = os.environ.get("ACCEL_CACHE_DIR")
    return (Path(chosen).expanduser() if chosen else user_cache_path("accel")) / "releases"


def folders(distribution: str, version: str, cache: Path) -> list[Path]:
    """The folders that a process needs first on its path to import this release; ReleaseError where there are none."""
    if distribution == "transformers":
        return [transformers(version, cache)]
    if distribution == "mamba-ssm":
        return [build(distribution, version, cache), transformers(MAMBA_NEEDS, cache)]
    if distribution == "causal-conv1d":
        return [build(distribution, version, cache)]
    return [install([f"{distribution}=={version}"], cache / f"{distribution}-{version}")]


def transformers(version: str, cache: Path) -> Path:
    """A folder with transformers and what it imports: no model, nothing that reaches the network."""
    everywhere = ["safetensors", "regex", "tqdm", "idna", "certifi"]
    needs = TRANSFORMERS.get(version) or list(TRANSFORMERS.values())[-1]
    return install([f"transformers=={version}", *needs, *everywhere], cache / f"transformers-{version}")


def build(name: str, version: str, cache: Path) -> Path:
    """A folder with a package whose setup.py asks for torch, built from source without CUDA."""
    folder = cache / f"{name}-{version}"
    if folder.is_dir():
        return folder
    # with the torch that is here: no isolation; FORCE_BUILD keeps setup.py from looking for a wheel
    prefix = name.partition("-ssm")[0].upper().replace("-", "_")
    tools = install(["setuptools", "wheel"], cache / "build-tools")
    env = {f"{prefix}_SKIP_CUDA_BUILD": "TRUE", f"{prefix}_FORCE_BUILD": "TRUE", "PYTHONPATH": str(tools)}
    options = ["--no-build-isolation", "--no-binary", name]
    return install([f"{name}=={version}"], folder, options, env)


def install(
    requirements: Sequence[str], folder: Path, options: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Path:
    """The folder, with these requirements and none of their dependencies; reused when present."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{folder.name}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                # renamed only when complete: an interrupted run leaves no half-filled folder behind
                filled = Path(scratch) / folder.name
                _pip(["install", "--quiet", "--no-deps", *options, "--target", str(filled), *requirements], env)
                filled.rename(folder)
    return folder


def newest(distribution: str) -> Version:
    """The newest release that pip finds, none before a final one; ReleaseError where it finds none."""
    said = _pip(["index", "versions", distribution])
    found = re.match(r"\S+ \((\S+)\)", said)
    if found is None:
        raise ReleaseError(f"pip says no version of {distribution}: {said[:200]!r}")
    return Version(found[1])


def _pip(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run([*PIP, *arguments], env={**os.environ, **(env or {})}, capture_output=True, text=True)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise ReleaseError(f"pip {arguments[0]}: {' '.join(words[-3:]) or f'exit code {done.returncode}'}")
    return done.stdout
