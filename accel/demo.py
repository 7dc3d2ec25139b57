"""The demo: FLA code as it is, run with the originals and accelerated, compared and timed. `python -m accel demo`.

A script rather than a module: importing it runs it. Without a GPU, FLA's kernels run in Triton's interpreter, which
cli.py chooses (TRITON_INTERPRET) before this file imports Triton.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from accel import accelerated, environment, record_routes, triton_cpu
from accel.routes import Route

INTERPRETED = triton_cpu.install()  # before FLA, which asks Triton for its device when it is imported
from fla.modules import ShortConvolution  # noqa: E402

NO_MODELS = "no GPU: FLA's models need compiled kernels"
if not INTERPRETED:
    try:
        from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

        NO_MODELS = ""
    except ImportError as error:
        NO_MODELS = f"flash-linear-attention with transformers is not importable ({error})"

DEVICE = torch.device("cpu") if INTERPRETED else torch.accelerator.current_accelerator()
BATCH, PROMPT, STEPS, NEW_TOKENS = 2, 12, 16, 32
CHANNELS = 64 if INTERPRETED else 2048
CONVOLUTION = f"{BATCH} x ({PROMPT} + {STEPS}) tokens, {CHANNELS} channels, bf16"
console = Console(highlight=False)


def main() -> int:
    """Run both parts; the number of checks that failed."""
    facts = environment.facts(DEVICE)
    console.print(f"device: {DEVICE}, {facts.detail}; accel's backend here: {facts.backend}")
    if INTERPRETED:
        console.print("FLA's Triton kernels are interpreted on the CPU: its times here are no measure of FLA")
    failed = compare(f"ShortConvolution, {CONVOLUTION}", short_convolution, 0.02)
    if NO_MODELS:
        console.print(f"\nGatedDeltaNetForCausalLM: skipped, {NO_MODELS}")
    else:
        failed += compare(
            f"GatedDeltaNetForCausalLM, hidden 256, 2 layers, {NEW_TOKENS} new tokens", language_model, 0.1
        )
    console.print(f"\n{failed} checks failed" if failed else "\nall checks hold", style="bold")
    return failed


class Result(NamedTuple):
    """What a run gives: outputs [..., D] or logits [steps, V]; the convolution's state; the tokens that were chosen."""

    outputs: torch.Tensor
    state: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


def short_convolution() -> Callable[[], Result]:
    """What runs: prefill and decode of one layer, each token a slice of a wider projection."""
    torch.manual_seed(0)
    layer = ShortConvolution(CHANNELS, 4, bias=True, activation="silu").to(DEVICE, torch.bfloat16)
    projection = torch.randn(BATCH, PROMPT + STEPS, 3 * CHANNELS).to(DEVICE, torch.bfloat16)
    tokens = projection[..., CHANNELS : 2 * CHANNELS]

    @torch.no_grad()
    def run():
        y, state = layer(tokens[:, :PROMPT], output_final_state=True)
        outputs = [y]
        for position in range(PROMPT, PROMPT + STEPS):
            y, state = layer(tokens[:, position : position + 1], cache=state, output_final_state=True)
            outputs.append(y)
        return Result(torch.cat(outputs, dim=1), state=state)

    return run


def language_model() -> Callable[[], Result]:
    """What runs: greedy `generate` of a small model with random weights."""
    torch.manual_seed(0)
    config = GatedDeltaNetConfig(hidden_size=256, num_hidden_layers=2, num_heads=2, head_dim=128, vocab_size=1000)
    model = GatedDeltaNetForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    prompt = torch.randint(config.vocab_size, (1, PROMPT)).to(DEVICE)
    length = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    answer = {"return_dict_in_generate": True, "output_logits": True}

    @torch.no_grad()
    def run():
        generated = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, **length, **answer
        )
        return Result(torch.cat(generated.logits), tokens=generated.sequences[0, PROMPT:])

    return run


def compare(title: str, build: Callable[[], Callable[[], Result]], tolerance: float) -> int:
    """Run with the originals, then accelerated; print differences, times and routes; count what does not hold."""
    console.rule(title)
    run = build()
    original, original_seconds = timed(run)
    with accelerated("short_conv", verbose=False), record_routes() as routes:
        ours, seconds = timed(run)
    with record_routes() as after:
        run()
    steps = comparable_steps(original, ours)
    difference = (original.outputs[:steps].float() - ours.outputs[:steps].float()).abs().max().item()
    largest = original.outputs.float().abs().max().item()
    checks = {
        f"outputs agree: largest difference {difference:.2e}, largest value {largest:.2f}": (
            difference <= tolerance * largest
        ),
        "every decode step ran natively": decoded_natively(routes),
        "restored: the original serves again": not after,
    }
    if original.state is not None:
        checks["the convolution's state is the same, bit for bit"] = torch.equal(original.state, ours.state)
    for text, holds in checks.items():
        console.print(f"{'ok' if holds else 'FAILED':>6}  {text}", style="green" if holds else "red")
    if steps < original.outputs.shape[0]:
        console.print(f"        compared {steps} steps: then rounding decided a near tie and the texts part")
    console.print(f"  time  original {original_seconds * 1e3:.1f} ms, accelerated {seconds * 1e3:.1f} ms")
    console.print(route_table(routes))
    return sum(not holds for holds in checks.values())


def comparable_steps(original: Result, ours: Result) -> int:
    """Logits are comparable up to the step where different tokens are chosen; other outputs always are."""
    if original.tokens is None:
        return original.outputs.shape[0]
    agreeing = int((original.tokens == ours.tokens).cumprod(0).sum())
    return min(agreeing + 1, original.outputs.shape[0])


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The second run's result and time: the first one compiles."""
    run()
    synchronize()
    start = time.perf_counter()
    result = run()
    synchronize()
    return result, time.perf_counter() - start


def synchronize() -> None:
    if not INTERPRETED:
        torch.accelerator.synchronize()


def decoded_natively(routes: list[Route]) -> bool:
    updates = [route.path for route in routes if route.callable == "causal_conv1d_update"]
    return bool(updates) and set(updates) == {"native"}


def route_table(routes: list[Route]) -> Table:
    """How often each callable took which route, in both runs of `timed`."""
    table = Table("target", "callable", "route", "calls", "why")
    for (target, name, route, detail), calls in Counter(
        (r.target, r.callable, str(r), r.detail) for r in routes
    ).items():
        table.add_row(target, name, route, str(calls), detail)
    return table


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
