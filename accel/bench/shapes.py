"""What to measure: shapes as they are given, those of a model's config, and some where nothing was asked for.

Imports no upstream by itself: a name that is no file goes to Transformers, which has to be installed for that.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """B rows of T tokens, D channels, W taps. A decode step has B rows of one token; a dense one D channels in and out.

    `dilation` is that of a dense convolution.
    """

    B: int
    T: int
    D: int
    W: int
    dilation: int = 1


OPS = ("update", "forward", "backward", "dense")
DEPTHWISE = OPS[:3]
Config = Mapping[str, Any]
Convolutions = list[tuple[int, int]]  # D and W of each kind of convolution in a model

# by device: of large and small calls one each, so that a run takes a minute
_CONV = {"cuda": [Shape(4, 4096, 4096, 4), Shape(1, 8192, 2048, 4)], "cpu": [Shape(1, 512, 1024, 4)]}
DEFAULTS = {
    "update": {"cuda": [Shape(128, 1, 4096, 4), Shape(1, 1, 2048, 4)], "cpu": [Shape(32, 1, 1024, 4)]},
    "forward": _CONV,
    "backward": _CONV,
    "dense": {"cuda": [Shape(16, 4096, 256, 3, 4)], "cpu": [Shape(2, 512, 64, 3, 4)]},
}
# of a model: a batch and one row for the step, a prompt for the rest
MODEL_ROWS = (32, 1)
MODEL_TOKENS = {"cuda": 4096, "cpu": 512}


def parse(text: str) -> Shape:
    """`B,T,D,W` or, with a dense convolution's dilation, `B,T,D,W,DILATION`; ValueError says what is wrong."""
    try:
        shape = Shape(*(int(word) for word in text.split(",")))
    except (TypeError, ValueError):
        raise ValueError(f"shape: expected B,T,D,W or B,T,D,W,DILATION, got {text!r}") from None
    if min(shape) < 1:
        raise ValueError(f"shape: expected numbers above 0, got {text!r}")
    return shape


def of_model(name: str, device: str) -> dict[str, list[Shape]]:
    """The shapes of a model's convolutions, by operation; ValueError where its config does not tell them."""
    found = convolutions(read_config(name))
    steps = [Shape(rows, 1, D, W) for D, W in found for rows in MODEL_ROWS]
    prompts = [Shape(1, MODEL_TOKENS[device], D, W) for D, W in found]
    return {"update": steps, "forward": prompts, "backward": prompts, "dense": []}


def read_config(name: str) -> Config:
    """The config of a model: a file or its folder, a model type of Transformers, or a repository on this disk."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"model: {path} is no JSON: {error}") from None
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"model: {name!r} is no file, and Transformers, which knows configs by name, is not installed")
    configs = importlib.import_module("transformers").AutoConfig
    try:
        return configs.for_model(name).to_dict()
    except ValueError:
        pass  # no model type: a repository
    try:
        return configs.from_pretrained(name, local_files_only=True).to_dict()
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"model: {name!r} is no file, no model type and not on this disk: {reason}") from None


def convolutions(config: Config) -> Convolutions:
    """The different short convolutions of a model, the config of whose text part counts where it has several."""
    config = config.get("text_config") or config
    kind = config.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"model: expected a model_type with short convolutions ({known}), got {kind!r}; give --shape")
    try:
        return list(dict.fromkeys(FAMILIES[kind](config)))
    except KeyError as error:
        raise ValueError(f"model: the config of this {kind} has no {error.args[0]!r}; give --shape") from None


def _mamba(c: Config) -> Convolutions:
    return [(int(c["expand"] * c["hidden_size"]), c["conv_kernel"])]


def _mamba2(c: Config) -> Convolutions:
    return [(int(c["expand"] * c["hidden_size"]) + 2 * c["n_groups"] * c["state_size"], c["conv_kernel"])]


def _jamba(c: Config) -> Convolutions:
    return [(int(c["mamba_expand"] * c["hidden_size"]), c["mamba_d_conv"])]


def _bamba(c: Config) -> Convolutions:
    inner = c.get("mamba_d_ssm") or int(c["mamba_expand"] * c["hidden_size"])  # Falcon-H1 may say it
    return [(inner + 2 * c["mamba_n_groups"] * c["mamba_d_state"], c["mamba_d_conv"])]


def _zamba2(c: Config) -> Convolutions:
    inner = int(c["mamba_expand"] * c["hidden_size"])
    return [(inner + 2 * c["mamba_ngroups"] * c["mamba_d_state"], c["mamba_d_conv"])]


def _nemotron_h(c: Config) -> Convolutions:
    inner = c["mamba_num_heads"] * c["mamba_head_dim"]
    return [(inner + 2 * c["n_groups"] * c["ssm_state_size"], c["conv_kernel"])]


def _lfm2(c: Config) -> Convolutions:
    return [(c["hidden_size"], c["conv_L_cache"])]


def _qwen3_next(c: Config) -> Convolutions:
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    return [(2 * keys + values, c["linear_conv_kernel_dim"])]


def _kimi_linear(c: Config) -> Convolutions:
    return [(3 * c["linear_num_heads"] * c["linear_head_dim"], c["linear_conv_kernel_dim"])]


def _gated_deltanet(c: Config) -> Convolutions:
    """FLA's: one convolution each for queries, keys and values."""
    heads, dim = c["num_heads"], c["head_dim"]
    values = (c.get("num_v_heads") or heads) * int(dim * c["expand_v"])
    return [(heads * dim, c["conv_size"]), (values, c["conv_size"])]


def _delta_net(c: Config) -> Convolutions:
    return [(int(c["hidden_size"] * c[key]), c["conv_size"]) for key in ("expand_k", "expand_v")]


FAMILIES: dict[str, Callable[[Config], Convolutions]] = {
    **dict.fromkeys(("mamba", "falcon_mamba"), _mamba),
    "mamba2": _mamba2,
    **dict.fromkeys(("jamba", "zamba"), _jamba),
    **dict.fromkeys(("bamba", "granitemoehybrid", "falcon_h1"), _bamba),
    "zamba2": _zamba2,
    "nemotron_h": _nemotron_h,
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _lfm2),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _qwen3_next),
    "olmo_hybrid": _qwen3_next,
    "kimi_linear": _kimi_linear,
    **dict.fromkeys(("gated_deltanet", "kda"), _gated_deltanet),
    "delta_net": _delta_net,
}
