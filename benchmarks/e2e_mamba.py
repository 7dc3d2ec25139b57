"""mamba_ssm's Mamba2 language model: a training step and greedy decode, with causal-conv1d, without, and accelerated.

`python -m benchmarks.e2e_mamba [--warm-up PROCESSES] [--dry-run]`. Without causal-conv1d there is no memory-efficient
training path: that row is the layer in steps, and says so.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from accel.bench.cases import distance, require
from benchmarks import decode_step, harness, presence, results, triton_cache
from benchmarks.e2e_decode import LOGITS
from benchmarks.e2e_train import timed
from benchmarks.harness import Entry
from benchmarks.presence import ALONE, OURS, PACKAGE, TORCH, Place

MODULES = ("modules.mamba_simple", "modules.mamba2", "modules.mamba2_simple", "modules.mha")
MODULES += ("ops.selective_scan_interface", "ops.triton.ssd_combined")
GRADIENTS = 3e-2  # relative L2, all of them together and those of the convolutions, bf16 through every layer
IN_STEPS = "in steps: the memory-efficient path needs causal-conv1d"
SIZES = {"d_model": 2048, "vocab_size": 32768}
SSM = {"layer": "Mamba2", "d_state": 128, "headdim": 64, "expand": 2}
TINY = {"d_model": 32, "vocab_size": 64}
TINY_SSM = {"layer": "Mamba2", "d_state": 16, "headdim": 8, "expand": 2, "chunk_size": 16}
Step = Callable[[], None]
Probe = Callable[[], dict[str, Tensor]]


def build(layers: int, device: torch.device, tiny: bool) -> nn.Module:
    """Random weights in bf16."""
    config = importlib.import_module("mamba_ssm.models.config_mamba").MambaConfig
    model = importlib.import_module("mamba_ssm.models.mixer_seq_simple").MambaLMHeadModel
    torch.manual_seed(0)
    made = config(n_layer=layers, ssm_cfg=TINY_SSM if tiny else SSM, **(TINY if tiny else SIZES))
    return model(made, device=device, dtype=torch.bfloat16)


def places() -> list[Place]:
    """Every name that mamba_ssm took from causal-conv1d."""
    modules = [importlib.import_module(f"mamba_ssm.{name}") for name in MODULES]
    found = [Place(module, name, None) for module in modules for name in vars(module) if name.startswith("causal_conv")]
    none = [f"{place.holder.__name__}.{place.name}" for place in found if place.held is None]
    require(not none, f"causal-conv1d is not what mamba_ssm has in {', '.join(none)}")
    return found


def training_of(model: nn.Module, T: int, device: torch.device) -> tuple[Step, Probe]:
    # a step size that changes nothing: every variant trains the same weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-12, weight_decay=0.0, fused=device.type == "cuda")
    ids = torch.randint(3, model.config.vocab_size, (1, T), device=device)

    def loss() -> Tensor:
        return F.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:])

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def probe() -> dict[str, Tensor]:
        found = loss()
        found.backward()
        named = [(name, p.grad.float().flatten()) for name, p in model.named_parameters()]
        convs = torch.cat([gradient for name, gradient in named if "conv1d" in name])
        optimizer.zero_grad(set_to_none=True)
        return {"loss": found.detach(), "gradients": torch.cat([g for _, g in named]), "conv gradients": convs}

    return step, probe


def in_steps(model: nn.Module, scope: presence.Scope) -> presence.Scope:
    """The same scope with every layer off the memory-efficient path."""
    switches = [Place(layer.mixer, "use_mem_eff_path", False) for layer in model.backbone.layers]

    def entered() -> AbstractContextManager:
        stack = ExitStack()
        stack.enter_context(scope())
        stack.enter_context(presence.put(switches))
        return stack

    return entered


def train_rows(model: nn.Module, scopes: Mapping[str, presence.Scope], T: int, rounds: int, rows: list[dict]) -> None:
    device, layers = next(model.parameters()).device, len(model.backbone.layers)
    step, probe = training_of(model.train(), T, device)
    scopes = {**scopes, TORCH: in_steps(model, scopes[TORCH])}
    case = {"op": "training step", "case": f"{layers} layers, T={T}"}
    want: dict[str, Tensor] = {}
    checked: dict[str, dict[str, float]] = {}

    def check(entry: Entry) -> None:
        found: dict[str, Tensor] = {}
        calls = 3 * layers if entry.name in (OURS, ALONE) else 0  # the forward, once more in the backward, and that
        presence.native_calls(lambda: found.update(probe()), calls)
        if entry.name == PACKAGE:
            with presence.wrong(model):
                presence.require_seen(distance(probe()["conv gradients"], found["conv gradients"].double()), GRADIENTS)
            want.update(found)
        require(bool(want), f"{PACKAGE} gave nothing to compare with")
        checked[entry.name] = {name: distance(found[name], value.double()) for name, value in want.items()}
        worst, limit = max(checked[entry.name].values()), presence.limit_of(entry.name, GRADIENTS)
        require(worst <= limit, f"{checked[entry.name]} from {PACKAGE}, limit {limit}")

    entries = [Entry(name, [], scope) for name, scope in scopes.items()]
    alive = harness.surviving(entries, check)
    want.clear()
    print(f"{case['op']}, {case['case']}: {checked}", flush=True)
    rows += [case | {"provider": entry.name, "gate": entry.note} for entry in entries if entry not in alive]
    spent: dict[str, list[float]] = {entry.name: [] for entry in alive}
    peaks = dict.fromkeys(spent, 0)
    for turn in [*alive, *harness.alternate(alive, rounds)]:
        with turn.scope():
            timed(step, device)  # switching leaves the host's caches cold
            seconds, peak = timed(step, device)
        spent[turn.name].append(seconds)
        peaks[turn.name] = max(peaks[turn.name], peak)
    spent = {name: samples[1:] for name, samples in spent.items()}  # without each variant's own first step
    for name, samples in spent.items():
        seconds = statistics.median(samples)
        row = case | {"provider": name, "gate": "ok", "step_ms": seconds * 1e3, "tokens_per_s": T / seconds}
        row |= {"peak_bytes": peaks[name], "over": presence.compared(spent, name), "apart": checked[name]}
        row |= {"all_ms": [s * 1e3 for s in samples]} | ({"note": IN_STEPS} if name == TORCH else {})
        rows.append(row)
        print(f"{presence.words(row)}; peak {peaks[name] / 2**30:.3f} GiB {row.get('note', '')}", flush=True)


class Decode(decode_step.Step):
    """After a prompt: `step()` feeds the last greedy token and gives the logits [N, V] after it."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, prompt: Tensor):
        parameters = importlib.import_module("mamba_ssm.utils.generation").InferenceParams
        self.model = model
        self.cache = parameters(max_seqlen=1 << 20, max_batch_size=prompt.shape[0])
        logits = model(prompt, inference_params=self.cache, num_last_tokens=1).logits[:, -1]
        self.cache.seqlen_offset = prompt.shape[1]  # that it is not 0 is all that a Mamba layer reads
        self.token = logits.argmax(-1, keepdim=True)
        self.saved = [tensor.clone() for tensor in self.tensors()]

    def tensors(self) -> list[Tensor]:
        return [self.token, *(state for states in self.cache.key_value_memory_dict.values() for state in states)]

    @torch.no_grad()
    def __call__(self) -> Tensor:
        logits = self.model(self.token, inference_params=self.cache, num_last_tokens=1).logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        return logits


def decode_rows(
    model: nn.Module, scopes: Mapping[str, presence.Scope], batch: int, tokens: int, rounds: int, rows: list[dict]
) -> None:
    device, layers = next(model.parameters()).device, len(model.backbone.layers)
    prompt = torch.randint(3, model.config.vocab_size, (batch, 16), device=device)
    want: list[list[Tensor]] = []
    steps: dict[str, Decode] = {}
    checked: dict[str, float] = {}

    def check(entry: Entry) -> None:
        count = min(8, tokens)

        def run() -> None:
            step = steps[entry.name] = Decode(model, prompt)
            found.extend(decode_step.fed(step, step, want[0] if want else None, count))

        found: list[list[Tensor]] = []
        presence.native_calls(run, layers * (1 + count) if entry.name in (OURS, ALONE) else 0)
        if entry.name == PACKAGE:
            with presence.wrong(model):
                logits = Decode(model, prompt)()
            presence.require_seen(distance(logits.float(), found[1][0].double()), LOGITS)
            want.extend(found)
        require(bool(want), f"{PACKAGE} gave nothing to compare with")
        worst = max(distance(a.float(), b.double()) for a, b in zip(found[1], want[1], strict=True))
        checked[entry.name], limit = worst, presence.limit_of(entry.name, LOGITS)
        require(worst <= limit, f"logits are {worst:.2e} from those of {PACKAGE}, limit {limit}")

    entries = [Entry(name, [], scope) for name, scope in scopes.items()]
    alive = harness.surviving(entries, check)
    print(f"decode, batch {batch}: {checked}", flush=True)
    case = {"op": "decode step", "case": f"{layers} layers, batch {batch}"}
    rows += [case | {"provider": entry.name, "gate": entry.note} for entry in entries if entry not in alive]

    def bind(entry: Entry) -> None:
        step = steps[entry.name]
        step.rewind()
        eager = step().clone()
        step.rewind()
        replay = step.captured()
        worst = distance(replay().float(), eager.double())
        require(worst <= LOGITS, f"a replay's logits are {worst:.2e} from an eager step's")
        entry.calls = [replay]

    for mode in ("eager", "graph") if device.type == "cuda" else ("eager",):
        if mode == "graph":
            alive = harness.surviving(alive, bind)
        else:
            for entry in alive:
                entry.calls = [steps[entry.name]]
        spent: dict[str, list[float]] = {entry.name: [] for entry in alive}
        for turn in harness.alternate(alive, rounds):
            with turn.scope():
                spent[turn.name].append(decode_step.seconds_a_step(steps[turn.name], turn.calls[0], tokens))
        for name, samples in spent.items():
            seconds = statistics.median(samples)
            row = case | {"case": f"{case['case']}, {mode}", "mode": mode, "provider": name, "gate": "ok"}
            row |= {"step_ms": seconds * 1e3, "tokens_per_s": batch / seconds, "logits": checked[name]}
            row |= {"over": presence.compared(spent, name), "all_ms": [s * 1e3 for s in samples]}
            rows.append(row)
            print(f"{presence.words(row)} ({mode})", flush=True)


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/e2e_mamba.json"),
    layers: int = 4,
    length: Annotated[int, typer.Option(help="tokens of a training step")] = 4096,
    batches: str = "1,32",
    tokens: Annotated[int, typer.Option(help="tokens decoded in a turn")] = 64,
    rounds: int = 16,
    warm_up: Annotated[int, typer.Option(help="processes that compile mamba_ssm's kernels side by side first")] = 0,
    share: Annotated[str, typer.Option(help="of such a process: I/N", hidden=True)] = "",
    dry_run: Annotated[bool, typer.Option(help="tiny, in Triton's interpreter")] = False,
) -> None:
    device = torch.device("cpu" if dry_run else "cuda")
    if dry_run:
        presence.stand_in()
        layers, length, tokens, rounds = 2, 20, 2, 1
    if share:
        triton_cache.take_share(share)
    elif warm_up:
        triton_cache.fill(warm_up, "-m", "benchmarks.e2e_mamba", "--length", str(length))
    model = build(1 if share else layers, device, tiny=dry_run)
    if dry_run:
        importlib.import_module("mamba_extensions").smallest_blocks("mamba_ssm.ops.triton.")
    if share:
        timed(training_of(model, length, device)[0], device)
        Decode(model, torch.zeros(1, 16, dtype=torch.long, device=device))()
        return
    rows: list[dict] = []
    found = places()
    scopes = presence.variants(found, "mamba")
    facts = {"layers": layers, "length": length, "tokens": tokens, "rounds": rounds, **SIZES, **SSM}
    facts["restored"] = presence.restores(found, scopes)
    for batch in [int(part) for part in batches.split(",")]:
        decode_rows(model.eval(), scopes, batch, tokens, rounds, rows)
        results.write(out, "e2e_mamba", rows, model=facts)
    train_rows(model, scopes, length, rounds, rows)
    facts["restored"] = presence.restores(found, scopes)
    print(facts["restored"])
    results.write(out, "e2e_mamba", rows, model=facts)


if __name__ == "__main__":
    typer.run(main)
