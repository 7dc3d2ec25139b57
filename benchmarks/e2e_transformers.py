"""Transformers' Qwen3-Next and Nemotron-H, small: prefill and greedy decode, with causal-conv1d, without, accelerated.

`python -m benchmarks.e2e_transformers [--families qwen3_next] [--warm-up PROCESSES] [--dry-run]`. Hidden size 2048,
eight layers in the family's order, random weights in bf16. Qwen3-Next's experts are dense here: a routing that flips
on a rounding difference would leave nothing for a gate to compare.
"""

from __future__ import annotations

import importlib
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

from accel.bench.cases import distance, require
from accel.bench.gates import reason_of
from benchmarks import harness, presence, results, triton_cache
from benchmarks.decode_step import synchronize
from benchmarks.harness import Entry
from benchmarks.presence import ALONE, OURS, PACKAGE, Place

LAYERS = 8
PAIR = ("causal_conv1d_fn", "causal_conv1d_update")
CHECKED = 8  # tokens of a gate
LOGITS = 6e-2  # relative L2 of the logits of one step, bf16 through eight layers; wrong taps give more than 1
FIRST = 4  # steps of a decode that are not timed
COMMON = {"hidden_size": 2048, "vocab_size": 4096, "tie_word_embeddings": False}
COMMON |= {"initializer_range": 0.02}
COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 8192}
NEMOTRON = ["linear_attention", "mlp", "linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
FAMILIES: dict[str, dict[str, Any]] = {
    # its own sizes; three layers of the linear kind to one of attention
    "qwen3_next": {"num_hidden_layers": LAYERS, "mlp_only_layers": list(range(LAYERS)), "intermediate_size": 5632},
    # Nemotron-H-8B's ratios at half of its width
    "nemotron_h": {
        "layers_block_type": [*NEMOTRON, "linear_attention"],
        "intermediate_size": 10752,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
    },
}
TINY_COMMON = COMMON | {"hidden_size": 32, "vocab_size": 64, "intermediate_size": 48}
TINY_COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TINY: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 4, "mlp_only_layers": list(range(4))}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "nemotron_h": {"layers_block_type": NEMOTRON, "mamba_num_heads": 8, "mamba_head_dim": 8}
    | {"n_groups": 2, "ssm_state_size": 16, "chunk_size": 16},
}


def build(family: str, device: torch.device, tiny: bool) -> nn.Module:
    transformers = importlib.import_module("transformers")
    sizes = TINY_COMMON | TINY[family] if tiny else COMMON | FAMILIES[family]
    torch.manual_seed(0)
    with device:
        config = transformers.AutoConfig.for_model(family, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "conv1d.weight" in name:
            torch.nn.init.normal_(parameter, std=0.5)  # large enough for a wrong tap to show in the logits
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=COMMON["initializer_range"])
    return model.to(device).eval()


def places(model: nn.Module) -> list[Place]:
    """The pair of functions of the model's module; under each of them is the module's own torch path."""
    module = sys.modules[type(model).__module__]
    found = [Place(module, name, vars(module)[name].__wrapped__) for name in PAIR]
    for place in found:
        serves = implementation(place.held)
        require(serves.startswith("causal_conv1d"), f"{place.name} is served by {serves}, not by causal-conv1d")
    return found


def implementation(function: Callable) -> str:
    """Where the function comes from that a function of a modeling module leads to."""
    held = inspect.getclosurevars(function).nonlocals.get("implementation", function)
    return f"{held.__module__}.{held.__qualname__}"


def kernels(model: nn.Module) -> dict[str, str]:
    """What serves each function of the module that a package can serve."""
    module = sys.modules[type(model).__module__]
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    led = {name: f for name, f in functions.items() if "implementation" in f.__code__.co_freevars}
    return {name: implementation(function) for name, function in led.items()}


def convolutions(model: nn.Module) -> int:
    return sum(isinstance(module, nn.Conv1d) for module in model.modules())


class Run(NamedTuple):
    """What a prompt and some tokens gave: seconds, the tokens fed, the logits after each."""

    prefill: float
    step: float
    tokens: list[Tensor]
    logits: list[Tensor]


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, count: int, forced: list[Tensor] | None = None) -> Run:
    """Greedy; `forced` feeds the tokens of another run."""
    synchronize()
    begin = time.perf_counter()
    out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    synchronize()
    prefill, begin = time.perf_counter() - begin, 0.0
    cache, tokens, logits = out.past_key_values, [], [out.logits[:, -1]]
    first = min(FIRST, count - 1)
    for at in range(count):
        if at == first:
            synchronize()
            begin = time.perf_counter()
        tokens.append(forced[at] if forced else logits[-1].argmax(-1, keepdim=True))
        out = model(input_ids=tokens[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits.append(out.logits[:, -1])
    synchronize()
    return Run(prefill, (time.perf_counter() - begin) / (count - first), tokens, logits)


def fitting(model: nn.Module, batch: int, length: int, scopes: Mapping[str, presence.Scope]) -> Tensor:
    """The longest prompt, of `length` tokens or a half, a quarter, that every variant has room for."""
    while True:
        prompt = torch.randint(3, model.config.vocab_size, (batch, length), device=model.device)
        if all(has_room(model, prompt, scope) for scope in scopes.values()):
            return prompt
        print(f"  batch {batch}: no room for a prompt of {length} tokens", flush=True)
        torch.cuda.empty_cache()
        length //= 2


def has_room(model: nn.Module, prompt: Tensor, scope: presence.Scope) -> bool:
    try:
        with scope():
            generate(model, prompt, 2)
    except torch.OutOfMemoryError:
        return False
    except Exception as error:  # noqa: BLE001 - what else fails is for the gate to say
        print(f"  ! {reason_of(error)}", flush=True)
    return True


def checks(model: nn.Module, prompt: Tensor, checked: dict[str, float]) -> Callable[[Entry], None]:
    """A gate: the logits of causal-conv1d on the same tokens, every convolution native where accel is on."""
    want: list[Run] = []

    def check(entry: Entry) -> None:
        found: list[Run] = []
        expected = convolutions(model) * (1 + CHECKED) if entry.name in (OURS, ALONE) else 0
        forced = want[0].tokens if want else None
        presence.native_calls(lambda: found.append(generate(model, prompt, CHECKED, forced)), expected)
        if entry.name == PACKAGE:
            with presence.wrong(model):
                logits = generate(model, prompt, 1).logits[0]
            presence.require_seen(distance(logits.float(), found[0].logits[0].double()), LOGITS)
            want.extend(found)
        require(bool(want), f"{PACKAGE} gave nothing to compare with")
        pairs = zip(found[0].logits, want[0].logits, strict=True)
        checked[entry.name] = max(distance(ours.float(), theirs.double()) for ours, theirs in pairs)
        limit = presence.limit_of(entry.name, LOGITS)
        require(checked[entry.name] <= limit, f"logits are {checked[entry.name]:.2e} from {PACKAGE}'s, limit {limit}")

    return check


def model_rows(
    family: str,
    model: nn.Module,
    scopes: Mapping[str, presence.Scope],
    prompt: Tensor,
    tokens: int,
    rounds: int,
    rows: list[dict],
) -> None:
    batch, length = prompt.shape
    checked: dict[str, float] = {}
    entries = [Entry(name, [], scope) for name, scope in scopes.items()]
    alive = harness.surviving(entries, checks(model, prompt, checked))
    where = f"{family}, batch {batch}, {length} tokens"
    print(f"{where}: {checked}", flush=True)
    rows += [{"op": "prefill", "case": where, "provider": e.name, "gate": e.note} for e in entries if e not in alive]
    spent: dict[str, dict[str, list[float]]] = {op: {e.name: [] for e in alive} for op in ("prefill", "decode step")}
    for turn in harness.alternate(alive, rounds):
        with turn.scope():
            generate(model, prompt, 1)  # not timed: switching leaves the host's caches cold
            run = generate(model, prompt, tokens)
        spent["prefill"][turn.name].append(run.prefill)
        spent["decode step"][turn.name].append(run.step)
    for op, samples in spent.items():
        case = where if op == "prefill" else f"{where}, then {tokens}"
        for name, all_seconds in samples.items():
            seconds = statistics.median(all_seconds)
            count = prompt.numel() if op == "prefill" else batch
            row = {"op": op, "case": case, "provider": name, "gate": "ok", "logits": checked[name]}
            row |= {"step_ms": seconds * 1e3, "tokens_per_s": count / seconds}
            row |= {"over": presence.compared(samples, name), "all_ms": [s * 1e3 for s in all_seconds]}
            rows.append(row)
            print(f"{presence.words(row)} ({op})", flush=True)


def update_arguments(model: nn.Module, module: Any, prompt: Tensor) -> tuple[tuple, dict]:
    """What the first layer gives to the module's own update in a decode step."""
    seen: list[tuple[tuple, dict]] = []
    function = module.causal_conv1d_update

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return function(*args, **kwargs)

    with presence.put([Place(module, "causal_conv1d_update", noting)]):
        generate(model, prompt, 1)
    return seen[0]


@torch.no_grad()
def host_rows(
    family: str, model: nn.Module, scopes: Mapping[str, presence.Scope], prompt: Tensor, timed: bool, rows: list[dict]
) -> None:
    """Host time of a decode convolution, called as the model calls it."""
    module = sys.modules[type(model).__module__]
    args, kwargs = update_arguments(model, module, prompt[:, :16])
    x = args[0]
    entries = [Entry(name, [lambda: module.causal_conv1d_update(*args, **kwargs)], s) for name, s in scopes.items()]

    def check(entry: Entry) -> None:
        presence.native_calls(entry.calls[0], 1 if entry.name in (OURS, ALONE) else 0)

    alive = harness.surviving(entries, check)
    if timed:
        harness.host_times(alive)
    case = f"{family}, x {tuple(x.shape)} of rows {x.stride(0)}"
    for entry in entries:
        row = {"op": "decode convolution", "case": case, "provider": entry.name, "gate": entry.note or "ok"}
        rows.append(row | entry.times)
        print(f"  {case} {entry.name:<14}{entry.times.get('host_us', float('nan')):9.2f} us on the host", flush=True)


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/e2e_transformers.json"),
    families: str = ",".join(FAMILIES),
    batches: str = "1,32",
    length: Annotated[int, typer.Option(help="tokens of a prompt, fewer where they find no room")] = 4096,
    tokens: Annotated[int, typer.Option(help="tokens decoded after it")] = 64,
    rounds: int = 8,
    warm_up: Annotated[int, typer.Option(help="processes that compile the scans' kernels side by side first")] = 0,
    share: Annotated[str, typer.Option(help="of such a process: I/N", hidden=True)] = "",
    dry_run: Annotated[bool, typer.Option(help="tiny, in Triton's interpreter")] = False,
) -> None:
    device = torch.device("cpu" if dry_run else "cuda")
    if dry_run:
        presence.stand_in()
        sys.modules["fla"] = None  # the interpreter does not take its delta rule
        length, tokens, rounds = 20, 2, 1
    if share:
        triton_cache.take_share(share)
    elif warm_up:
        triton_cache.fill(warm_up, "-m", "benchmarks.e2e_transformers", "--families", families, "--length", str(length))
    rows: list[dict] = []
    facts: dict[str, Any] = {"length": length, "tokens": tokens, "rounds": rounds}
    for family in families.split(","):
        model = build(family, device, tiny=dry_run)
        if share:
            generate(model, torch.zeros(1, length, dtype=torch.long, device=device), 2)
            continue
        found = places(model)
        scopes = presence.variants(found, "transformers")
        restored = presence.restores(found, scopes)
        for batch in [int(part) for part in batches.split(",")]:
            prompt = fitting(model, batch, length, scopes)
            model_rows(family, model, scopes, prompt, tokens, rounds, rows)
            host_rows(family, model, scopes, prompt, not dry_run, rows)
            facts[family] = {"config": model.config.to_diff_dict(), "kernels": kernels(model), "restored": restored}
            results.write(out, "e2e_transformers", rows, model=facts)
        print(f"{family}: {presence.restores(found, scopes)}; {kernels(model)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
