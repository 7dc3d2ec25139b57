"""Greedy decode of FLA's GatedDeltaNet: as it is, accelerated, and with the short convolutions stubbed.

`python -m benchmarks.e2e_decode [--mode eager | graph | compiled] [--dry-run]`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from accel.bench import providers
from accel.bench.cases import distance, require
from benchmarks import harness, results
from benchmarks.decode_step import Step, compiled, seconds_a_step, synchronize
from benchmarks.gated_deltanet import VARIANTS, build, native_calls
from benchmarks.harness import Entry

PROMPT = 16
LOGITS = 3e-2  # relative L2 of the logits of one step, bf16 through every layer


@torch.no_grad()
def decode(
    model: nn.Module, prompt: Tensor, steps: int, forced: list[Tensor] | None = None
) -> tuple[list, list, float]:
    """Greedy tokens, logits and seconds a step; `forced` feeds the tokens of another run."""
    out = model(input_ids=prompt, use_cache=True)
    cache, tokens, logits = out.past_key_values, [], [out.logits[:, -1]]
    token = logits[0].argmax(-1, keepdim=True)
    begin = 0.0
    for i in range(steps):
        if i == min(4, steps - 1):
            synchronize()
            begin = time.perf_counter()
        tokens.append(token)
        out = model(input_ids=forced[i] if forced else token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        step = out.logits[:, -1]
        if len(logits) < 33:
            logits.append(step)
        token = step.argmax(-1, keepdim=True)
    synchronize()
    return tokens, logits, (time.perf_counter() - begin) / (steps - min(4, steps - 1))


def gate(model: nn.Module, prompt: Tensor, steps: int, layers: int) -> dict[str, float]:
    """Same logits on the same tokens, every short convolution native: three a layer and step."""
    tokens, want, _ = decode(model, prompt, steps)
    got: list = []
    calls = native_calls(lambda: got.extend(decode(model, prompt, steps, tokens)))
    require(calls >= 3 * layers * steps, f"{calls} native calls, expected {3 * layers * steps}")
    worst = max(distance(a.float(), b.double()) for a, b in zip(got[1], want, strict=True))
    require(worst <= LOGITS, f"logits are {worst:.2e} apart, limit {LOGITS}")
    same = sum((a == b).sum().item() for a, b in zip(got[0], tokens, strict=True))
    return {"logits": worst, "same_tokens": same / (len(tokens) * tokens[0].numel()), "native_calls": calls}


def eager_run(model: nn.Module, prompt: Tensor, name: str, tokens: int) -> Callable[[], float]:
    """run() decodes `tokens` tokens with one variant and gives the seconds a step."""

    def run() -> float:
        with VARIANTS[name]():
            return decode(model, prompt, tokens)[2]

    return run


def graph_run(model: nn.Module, prompt: Tensor, name: str, tokens: int) -> Callable[[], float]:
    """The same with one captured step, replayed; without a GPU the step is run as it is."""
    with VARIANTS[name]():
        step = Step(model, prompt)
        replay = step.captured() if torch.cuda.is_available() else step
        _, want, _ = decode(model, prompt, 4)
        for number, logits in enumerate(want[1:]):
            found = distance(replay().float(), logits.double())
            require(found <= LOGITS, f"logits of replay {number} are {found:.2e} from the eager step's")

    def run() -> float:
        with VARIANTS[name]():
            return seconds_a_step(step, replay, tokens)

    return run


def compiled_run(model: nn.Module, prompt: Tensor, name: str, tokens: int) -> Callable[[], float]:
    """The same through torch.compile, one compiled model a variant, traced and checked in the variant's scope."""
    require(torch.cuda.is_available(), "torch.compile cannot trace Triton's interpreter")
    made = compiled(model)
    with VARIANTS[name]():
        fed, want, _ = decode(model, prompt, 4)
        for _ in range(2):  # the number of tokens in the cache becomes dynamic at the second
            _, got, _ = decode(made, prompt, 4, fed)
        worst = max(distance(a.float(), b.double()) for a, b in zip(got, want, strict=True))
        require(worst <= LOGITS, f"compiled logits are {worst:.2e} from the eager ones")

    def run() -> float:
        with VARIANTS[name]():
            return decode(made, prompt, tokens)[2]

    return run


MODES = {"eager": eager_run, "graph": graph_run, "compiled": compiled_run}


def row_of(batch: int, mode: str, name: str, note: str = "") -> dict:
    return {"op": "decode step", "case": f"batch {batch}", "mode": mode, "provider": name, "gate": note or "ok"}


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/e2e_decode.json"),
    layers: int = 2,
    batches: str = "1,32",
    tokens: int = 24,
    rounds: int = 24,
    expand_v: float = 2.0,
    mode: Annotated[str, typer.Option(help="eager, graph (one captured step, replayed) or compiled")] = "eager",
    dry_run: Annotated[bool, typer.Option(help="a tiny model in Triton's interpreter")] = False,
) -> None:
    device = torch.device("cpu" if dry_run else "cuda")
    providers.interpret()
    model = build(layers, device, expand_v, tiny=dry_run).eval()
    rows: list[dict] = []
    for batch in [int(part) for part in batches.split(",")]:
        prompt = torch.randint(3, 100, (batch, 4 if dry_run else PROMPT), device=device)
        checked: dict[str, float] = {}
        entry = Entry("accel", [])

        def check(_: Entry, prompt: Tensor = prompt, checked: dict = checked) -> None:
            checked.update(gate(model, prompt, 3 if dry_run else 24, layers))

        alive = harness.surviving([entry], check)
        print(f"batch {batch}: {checked}", flush=True)
        if not alive:
            rows.append(row_of(batch, mode, "accel", entry.note))
        made = [Entry(name, []) for name in VARIANTS if name != "accel" or alive]

        def bind(entry: Entry, prompt: Tensor = prompt) -> None:
            entry.calls = [MODES[mode](model, prompt, entry.name, 2 if dry_run else tokens)]

        ready = harness.surviving(made, bind)
        rows += [row_of(batch, mode, entry.name, entry.note) for entry in made if entry not in ready]
        spent: dict[str, list[float]] = {entry.name: [] for entry in ready}
        for turn in harness.alternate(ready, 1 if dry_run else rounds):
            spent[turn.name].append(turn.calls[0]())
        for name, all_seconds in spent.items():
            step = statistics.median(all_seconds)
            row = row_of(batch, mode, name) | {"step_ms": step * 1e3, "tokens_per_s": batch / step}
            row |= {"all_ms": [s * 1e3 for s in all_seconds]} | (checked if name == "accel" else {})
            words = f"  {name:<6} {step * 1e3:7.3f} ms a step, {batch / step:9.1f} tokens/s"
            if "FLA" in spent:
                # neighbours in time are compared: a shared machine's speed drifts more than the variants differ
                over = statistics.median(theirs / ours for theirs, ours in zip(spent["FLA"], all_seconds, strict=True))
                best = min(spent["FLA"]) / min(all_seconds)
                row |= {"over_fla": over, "over_fla_best": best}
                words += f"; {over:.3f} x FLA pair by pair, {best:.3f} x by the best of each"
            rows.append(row)
            print(words, flush=True)
        model_facts = {"layers": layers, "expand_v": expand_v, "prompt": PROMPT, "tokens": tokens, "rounds": rounds}
        results.write(out, "e2e_decode", rows, mode=mode, model=model_facts)


if __name__ == "__main__":
    typer.run(main)
