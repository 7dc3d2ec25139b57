"""Prefill and generate with a hybrid of Transformers: layers with a short convolution, and attention between them.

    python examples/hybrid.py [--device cuda] [--model lfm2]

A small config with random weights; a checkpoint is loaded by `from_pretrained` instead, and nothing else changes.
"""

import argparse
import os
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--model", choices=("qwen3_next", "lfm2"), default="qwen3_next")
parser.add_argument("--tokens", type=int, default=16, help="how many are generated")
args = parser.parse_args()
if args.device == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: no GPU is looked for
    sys.modules["fla"] = None  # where it is installed, Transformers would take its kernels on the CPU too

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from accel import accelerate_transformers, route_counts

CONFIGS = {
    "qwen3_next": dict(
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        head_dim=32,
        num_experts=0,
    ),
    "lfm2": dict(layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=3),
}
COMMON = dict(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)

accelerate_transformers()  # the one line
torch.manual_seed(0)
config = AutoConfig.for_model(args.model, **COMMON, **HEADS, **CONFIGS[args.model])
model = AutoModelForCausalLM.from_config(config).eval()
model = model.to(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
prompt = torch.randint(3, 256, (2, 24), device=args.device)
length = dict(min_new_tokens=args.tokens, max_new_tokens=args.tokens)

with torch.no_grad():
    prefill = model(prompt, use_cache=True)
    print(f"{args.model}: prefill of {list(prompt.shape)} tokens, logits {list(prefill.logits.shape)}")
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **length)
print(f"generated: {found[0, prompt.shape[1] :].tolist()}")
for route, calls in route_counts().items():
    print(f"{calls:5} x {route.callable}: {route}")
sys.exit(0 if any(route.path == "native" for route in route_counts()) else 1)
