"""Qwen3-Next's decode step with a cache of fixed size: eager, through torch.compile, and as a CUDA graph.

`python -m benchmarks.e2e_transformers_step [--modes eager,graph,compiled] [--warm-up PROCESSES] [--dry-run]`. With
causal-conv1d, without it, and accelerated either way; the models of `e2e_transformers`. The dry run is eager alone.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from accel.bench.cases import distance, require
from benchmarks import decode_step, harness, presence, results, triton_cache
from benchmarks.e2e_transformers import CHECKED, LOGITS, build, convolutions, kernels, places
from benchmarks.harness import Entry
from benchmarks.presence import ALONE, OURS, PACKAGE

PROMPT = 64


class Step(decode_step.Step):
    """After a prompt: `step()` feeds the last greedy token and gives the logits [N, V] after it.

    `forward` is the model, or what torch.compile made of it; the prompt is always the model's own.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, prompt: Tensor, room: int):
        static = importlib.import_module("transformers").StaticCache
        self.forward: Callable[..., Any] = model
        self.cache = static(config=model.config, max_cache_len=prompt.shape[1] + room)
        out = model(input_ids=prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.token = out.logits[:, -1].argmax(-1, keepdim=True)
        self.saved = [tensor.clone() for tensor in self.tensors()]

    def tensors(self) -> list[Tensor]:
        found = [self.token]
        for layer in self.cache.layers:
            if hasattr(layer, "keys"):
                found += [layer.keys, layer.values, layer.cumulative_length]
            for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                found += [state for state in states.values() if state is not None]
        return found

    @torch.no_grad()
    def __call__(self) -> Tensor:
        logits = self.forward(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        return logits


def of_mode(step: Step, mode: str, model: nn.Module) -> Callable[[], Tensor]:
    """The step in its mode, made in the variant's scope."""
    if mode == "graph":
        return step.captured()
    if mode == "compiled":
        step.forward = decode_step.compiled(model)
    return step


def mode_rows(
    model: nn.Module,
    scopes: Mapping[str, presence.Scope],
    prompt: Tensor,
    mode: str,
    tokens: int,
    rounds: int,
    rows: list[dict],
) -> None:
    want: list[list[Tensor]] = []
    checked: dict[str, float] = {}
    steps: dict[str, tuple[Step, Callable[[], Tensor]]] = {}

    def check(entry: Entry) -> None:
        """Eager steps are native where accel is on; the mode's logits are those of causal-conv1d's eager steps."""
        room = tokens + CHECKED + 8
        found: list[list[Tensor]] = []

        def eager() -> None:
            step = Step(model, prompt, room)
            steps[entry.name] = step, step
            found.extend(decode_step.fed(step, step, want[0] if want else None, CHECKED))

        expected = convolutions(model) * (1 + CHECKED) if entry.name in (OURS, ALONE) else 0
        presence.native_calls(eager, expected)
        if entry.name == PACKAGE:
            with presence.wrong(model):
                other = Step(model, prompt, room)
                presence.require_seen(distance(other().float(), found[1][0].double()), LOGITS)
            want.extend(found)
        require(bool(want), f"{PACKAGE} gave nothing to compare with")
        step = steps[entry.name][0]
        call = of_mode(step, mode, model)
        steps[entry.name] = step, call
        _, logits = decode_step.fed(step, call, want[0], CHECKED)
        pairs = zip(logits, want[1], strict=True)
        checked[entry.name] = max(distance(ours.float(), theirs.double()) for ours, theirs in pairs)
        limit = presence.limit_of(entry.name, LOGITS)
        require(checked[entry.name] <= limit, f"logits are {checked[entry.name]:.2e} from {PACKAGE}'s, limit {limit}")

    entries = [Entry(name, [], scope) for name, scope in scopes.items()]
    alive = harness.surviving(entries, check)
    case = {"op": "decode step", "case": f"batch {prompt.shape[0]}, {mode}", "mode": mode}
    print(f"{case['case']}: {checked}", flush=True)
    rows += [case | {"provider": entry.name, "gate": entry.note} for entry in entries if entry not in alive]
    spent: dict[str, list[float]] = {entry.name: [] for entry in alive}
    for turn in harness.alternate(alive, rounds):
        with turn.scope():
            spent[turn.name].append(decode_step.seconds_a_step(*steps[turn.name], tokens))
    for name, samples in spent.items():
        seconds = statistics.median(samples)
        row = case | {"provider": name, "gate": "ok", "logits": checked[name], "step_ms": seconds * 1e3}
        row |= {"tokens_per_s": prompt.shape[0] / seconds, "over": presence.compared(spent, name)}
        rows.append(row | {"all_ms": [s * 1e3 for s in samples]})
        print(f"{presence.words(rows[-1])} ({mode})", flush=True)


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/e2e_qwen3_next_step.json"),
    families: str = "qwen3_next",
    modes: str = "eager,graph,compiled",
    batch: int = 1,
    tokens: Annotated[int, typer.Option(help="tokens decoded in a turn")] = 64,
    rounds: int = 16,
    warm_up: Annotated[int, typer.Option(help="processes that compile the scans' kernels side by side first")] = 0,
    share: Annotated[str, typer.Option(help="of such a process: I/N", hidden=True)] = "",
    dry_run: Annotated[bool, typer.Option(help="tiny, in Triton's interpreter")] = False,
) -> None:
    device = torch.device("cpu" if dry_run else "cuda")
    prompt_length = PROMPT
    if dry_run:
        presence.stand_in()
        sys.modules["fla"] = None  # the interpreter does not take its delta rule
        modes, tokens, rounds, prompt_length = "eager", 2, 1, 9
    if share:
        triton_cache.take_share(share)
    elif warm_up:
        triton_cache.fill(warm_up, "-m", "benchmarks.e2e_transformers_step", "--families", families)
    rows: list[dict] = []
    facts: dict[str, Any] = {"prompt": prompt_length, "tokens": tokens, "rounds": rounds}
    for family in families.split(","):
        model = build(family, device, tiny=dry_run)
        prompt = torch.randint(3, model.config.vocab_size, (batch, prompt_length), device=device)
        if share:
            Step(model, prompt, 2)()
            continue
        found = places(model)
        scopes = presence.variants(found, "transformers")
        facts["restored"] = presence.restores(found, scopes)
        for mode in modes.split(","):
            mode_rows(model, scopes, prompt, mode, tokens, rounds, rows)
            facts[family] = {"config": model.config.to_diff_dict(), "kernels": kernels(model)}
            results.write(out, "e2e_transformers_step", rows, model=facts)
        print(f"{family}: {presence.restores(found, scopes)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
