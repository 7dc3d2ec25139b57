"""Train FLA's GatedDeltaNet from scratch, byte by byte, on a text that comes with Python; the loss is printed.

    python examples/train_gated_deltanet.py [--device cuda] [--save FOLDER]

On the CPU FLA's Triton kernels are interpreted. Triton's interpreter refuses one of those that training needs, the
chunked recurrence: there it is computed by the torch form that FLA ships. The short convolutions are accel's on both.
"""

import argparse
import os
import sys
from pydoc_data.topics import topics

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--steps", type=int, help="20 on the CPU, 300 on a GPU")
parser.add_argument("--save", metavar="FOLDER", help="keep the model, for generate.py --load FOLDER")
args = parser.parse_args()
if args.device == "cpu":  # before torch and Triton are imported: no GPU, and an interpreter
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")

import torch
import torch.nn.functional as F

from accel import accelerate_fla, route_counts, triton_cpu

triton_cpu.install()  # before FLA, which asks Triton for its device when it is imported
from fla.layers import gated_deltanet
from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

SIZES = {
    "cpu": dict(hidden_size=32, num_heads=1, head_dim=32, expand_v=1, intermediate_size=32, num_hidden_layers=2),
    "cuda": dict(hidden_size=256, num_heads=4, head_dim=64, expand_v=1, num_hidden_layers=4),
}
BATCH, LENGTH = {"cpu": (2, 48), "cuda": (16, 512)}[args.device]
STEPS = args.steps or {"cpu": 20, "cuda": 300}[args.device]


def naive_recurrence(q, k, v, g, beta, A_log, dt_bias, **options):
    """What FLA 0.6's layer asks of that kernel: q, k, v [B, T, H, D], and g and beta [B, T, H] as projected."""
    decay = -A_log.exp() * F.softplus(g + dt_bias)
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    return naive_chunk_gated_delta_rule(q, k, v, decay, beta.sigmoid(), chunk_size=16)


def batches(data):
    """Random windows [BATCH, LENGTH] of the text."""
    while True:
        starts = torch.randint(len(data) - LENGTH, (BATCH,))
        yield torch.stack([data[start : start + LENGTH] for start in starts]).to(args.device)


accelerate_fla(targets="short_conv")  # the one line
torch.manual_seed(0)
fused = args.device == "cuda"  # FLA's fused loss refuses the CPU; the other fused kernels are slow there
if not fused:
    gated_deltanet.chunk_gated_delta_rule = naive_recurrence
fusions = dict(fuse_cross_entropy=fused, fuse_norm=fused, fuse_swiglu=fused)
config = GatedDeltaNetConfig(vocab_size=128, **SIZES[args.device], **fusions)
model = GatedDeltaNetForCausalLM(config).to(args.device, torch.bfloat16 if fused else torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if fused else 1e-2)
text = "\n".join(topics.values()).encode("ascii", "ignore")
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
print(f"{len(data)} bytes of text, {sum(p.numel() for p in model.parameters())} parameters, on {args.device}")

for step, tokens in zip(range(STEPS + 1), batches(data), strict=False):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % (STEPS // 10 or 1) == 0:
        print(f"step {step:4}  loss {loss.item():.3f}")

if args.save:
    model.save_pretrained(args.save)
for route, calls in route_counts().items():
    print(f"{calls:5} x {route.callable}: {route}")
sys.exit(0 if any(route.path == "native" for route in route_counts()) else 1)
