"""One decode step of a model as a function of nothing: its token and its states stay where they are.

So a step can be captured once and replayed, each replay going on where the last one ended. `Step` is of an FLA model;
other models override how a step is begun and made. Torch only.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn


def states_of(layer: dict) -> list[Tensor]:
    """The tensors of one layer's cache: the recurrent state, then those of its convolutions."""
    return [layer["recurrent_state"], *layer["conv_state"]]


class Step:
    """After a prompt: `step()` feeds the last greedy token and gives the logits [N, V] after it."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, prompt: Tensor):
        out = model(input_ids=prompt, use_cache=True)
        self.model, self.cache = model, out.past_key_values
        self.token = out.logits[:, -1].argmax(-1, keepdim=True)
        self.layers = [self.cache[index] for index in range(len(self.cache))]
        self.states = [states_of(layer) for layer in self.layers]
        self.saved = [tensor.clone() for tensor in self.tensors()]

    def tensors(self) -> list[Tensor]:
        return [self.token, *(tensor for states in self.states for tensor in states)]

    @torch.no_grad()
    def __call__(self) -> Tensor:
        logits = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits[:, -1]
        for layer, states in zip(self.layers, self.states, strict=True):
            for mine, new in zip(states, states_of(layer), strict=True):
                if new is not mine:  # a model replaces its recurrent state, and updates those of its convolutions
                    mine.copy_(new)
            layer["recurrent_state"], layer["conv_state"] = states[0], tuple(states[1:])
        self.token.copy_(logits.argmax(-1, keepdim=True))
        return logits

    def rewind(self) -> None:
        """Back to the end of the prompt."""
        for tensor, before in zip(self.tensors(), self.saved, strict=True):
            tensor.copy_(before)

    def captured(self) -> Callable[[], Tensor]:
        """The same step as a CUDA graph; it writes its logits into the same tensor each time."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self()
        self.rewind()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def compiled(model: nn.Module) -> Callable:
    """torch.compile of a model, whose code other variants share: with a backend object of its own.

    What dynamo made of a function it takes again for the same backend, also where it broke off at a callable that is
    swapped by now, for it guards what it traced and not what it left alone.
    """
    # one to trace for a prompt and for steps, in each variant
    torch._dynamo.config.recompile_limit = 64
    make = importlib.import_module("torch._inductor.compile_fx").compile_fx
    return torch.compile(model, backend=lambda graph, inputs: make(graph, inputs))


def fed(step: Step, call: Callable[[], Tensor], tokens: list[Tensor] | None, count: int) -> tuple[list, list]:
    """(tokens, logits) of `count` steps from the end of the prompt; `tokens` are those of another run.

    `call` is the step itself or what was made of it.
    """
    step.rewind()
    used, logits = [], []
    for at in range(count):
        if tokens:
            step.token.copy_(tokens[at])
        used.append(step.token.clone())
        logits.append(call().clone())
    return used, logits


@torch.no_grad()
def seconds_a_step(step: Step, call: Callable[[], Tensor], count: int) -> float:
    """Of `count` steps from the end of the prompt; one before them is not timed, for a switch leaves caches cold."""
    call()
    step.rewind()
    synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter() - begin) / count


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
