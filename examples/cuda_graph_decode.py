"""Decode with a CUDA graph: one step of an FLA model is captured, and replayed for each token.

    python examples/cuda_graph_decode.py [--device cuda]

On the CPU there are no graphs: the same step runs eagerly there, with FLA's Triton kernels interpreted.
"""

import argparse
import os
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--tokens", type=int, default=8, help="how many are generated, 3 or more")
args = parser.parse_args()
if args.device == "cpu":  # before torch and Triton are imported: no GPU, and an interpreter
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")

import torch

from accel import accelerate_fla, route_counts, triton_cpu

triton_cpu.install()  # before FLA, which asks Triton for its device when it is imported
from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

WARM_UP = 3  # steps before the capture, which make every kernel
SIZES = dict(hidden_size=32, num_heads=1, head_dim=32, expand_v=1, num_hidden_layers=2, intermediate_size=32)


class Decoder:
    """Greedy decoding after a prompt; the token and all states stay where they are, as a graph needs them."""

    def __init__(self, model, prompt):
        out = model(prompt, use_cache=True)
        self.model, self.cache = model, out.past_key_values
        self.token = out.logits[:, -1].argmax(-1, keepdim=True)
        self.layers = [self.cache[index] for index in range(len(self.cache))]
        self.states = [layer["recurrent_state"] for layer in self.layers]

    def step(self):
        logits = self.model(self.token, past_key_values=self.cache, use_cache=True).logits
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        for layer, state in zip(self.layers, self.states, strict=True):
            # FLA replaces this state; those of the convolutions are updated in place
            layer["recurrent_state"] = state.copy_(layer["recurrent_state"])

    def run(self, step, number):
        """The token after each step."""
        found = []
        for _ in range(number):
            step()
            found.append(self.token.item())
        return found


def graph_of(step):
    """The step as a graph; a capture runs nothing."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


accelerate_fla(targets="short_conv")  # the one line
torch.manual_seed(0)
model = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(vocab_size=128, **SIZES)).to(args.device).eval()
prompt = torch.randint(3, 128, (1, 8), device=args.device)
with torch.no_grad():
    decoder = Decoder(model, prompt)
    tokens = decoder.run(decoder.step, WARM_UP)
    if args.device == "cuda":
        replay = graph_of(decoder.step).replay
        print("CUDA: the step is a graph; its routes are counted at the capture, not at each replay")
    else:
        replay = decoder.step
        print("CPU: no CUDA graph here, the same step runs eagerly")
    tokens += decoder.run(replay, args.tokens - WARM_UP)
    eager = Decoder(model, prompt)
    print(f"tokens {tokens}, the eager ones: {tokens == eager.run(eager.step, args.tokens)}")
for route, calls in route_counts().items():
    print(f"{calls:5} x {route.callable}: {route}")
sys.exit(0 if any(route.path == "native" for route in route_counts()) else 1)
