"""Generate with a cache from an FLA model: prefill, then token by token, once as FLA is and once accelerated.

    python examples/generate.py [--device cuda] [--load FOLDER] [--prompt TEXT]

The model has random weights, or those that train_gated_deltanet.py --save FOLDER has left.
On the CPU FLA's Triton kernels are interpreted.
"""

import argparse
import os
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--load", metavar="FOLDER", help="a model that train_gated_deltanet.py has saved")
parser.add_argument("--prompt", default="import")
parser.add_argument("--tokens", type=int, default=8, help="how many are generated")
args = parser.parse_args()
if args.device == "cpu":  # before torch and Triton are imported: no GPU, and an interpreter
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")

import torch

from accel import accelerated, route_counts, triton_cpu

triton_cpu.install()  # before FLA, which asks Triton for its device when it is imported
from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

torch.manual_seed(0)
if args.load:
    model = GatedDeltaNetForCausalLM.from_pretrained(args.load)
else:
    sizes = dict(hidden_size=32, num_heads=1, head_dim=32, expand_v=1, num_hidden_layers=2, intermediate_size=32)
    model = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(vocab_size=128, **sizes))
model = model.to(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32).eval()
prompt = torch.tensor([list(args.prompt.encode("ascii", "replace"))], device=args.device)


@torch.no_grad()
def continuation():
    """Greedy: the bytes that follow the prompt."""
    length = dict(min_new_tokens=args.tokens, max_new_tokens=args.tokens)
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, use_cache=True, **length
    )
    return bytes(found[0, prompt.shape[1] :].tolist())


original = continuation()
with accelerated("short_conv", verbose=False):  # off again after the block
    ours = continuation()

print(f"{args.prompt!r} goes on with {ours!r}")
same = len(os.path.commonprefix([original, ours]))
print(f"the first {same} of {args.tokens} tokens are the original's")  # then rounding may decide a near tie
for route, calls in route_counts().items():
    print(f"{calls:5} x {route.callable}: {route}")
sys.exit(0 if any(route.path == "native" for route in route_counts()) else 1)
