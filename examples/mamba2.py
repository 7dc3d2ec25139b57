"""Train a small Mamba2 on the order of the alphabet, then decode from it.

    python examples/mamba2.py [--device cuda] [--package transformers]

On a GPU it is mamba_ssm's Mamba2, whose kernels need one; on the CPU it is that of Transformers, 5.15 or newer, which
computes the scan in torch. In both the convolution is accel's, whether causal-conv1d is installed or not.
"""

import argparse
import importlib
import os
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--package", choices=("mamba_ssm", "transformers"), help="mamba_ssm on a GPU, else transformers")
parser.add_argument("--steps", type=int, default=30)
args = parser.parse_args()
package = args.package or ("mamba_ssm" if args.device == "cuda" else "transformers")
if args.device == "cpu":
    if package == "mamba_ssm":
        parser.error("mamba_ssm's kernels need a GPU: --device cuda")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: no GPU is looked for
    sys.modules["mamba_ssm"] = None  # where it is installed, Transformers would take its kernels on the CPU too

import torch
import torch.nn.functional as F

from accel import accelerate, route_counts

LETTERS, STATE, HEAD, CHUNK, WIDTH, LAYERS = 26, 16, 32, 16, 64, 2


def mamba_ssm_model():
    mixer = importlib.import_module("mamba_ssm.models.mixer_seq_simple")
    config = importlib.import_module("mamba_ssm.models.config_mamba").MambaConfig
    ssm = dict(layer="Mamba2", d_state=STATE, headdim=HEAD, chunk_size=CHUNK)
    made = config(d_model=WIDTH, n_layer=LAYERS, vocab_size=LETTERS, ssm_cfg=ssm)
    return mixer.MambaLMHeadModel(made, device=args.device)


def transformers_model():
    transformers = importlib.import_module("transformers")
    ssm = dict(state_size=STATE, head_dim=HEAD, num_heads=2 * WIDTH // HEAD, n_groups=1, chunk_size=CHUNK)
    ends = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    config = transformers.Mamba2Config(hidden_size=WIDTH, num_hidden_layers=LAYERS, vocab_size=LETTERS, **ssm, **ends)
    return transformers.Mamba2ForCausalLM(config).to(args.device)


@torch.no_grad()
def decode(model, prompt, tokens):
    """Greedy, with the states of convolution and scan as the cache; both packages call it generate."""
    if package == "mamba_ssm":
        return model.generate(prompt, max_length=prompt.shape[1] + tokens)
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False)


accelerate("mamba" if package == "mamba_ssm" else "transformers")  # the one line
torch.manual_seed(0)
model = mamba_ssm_model() if package == "mamba_ssm" else transformers_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(args.steps + 1):
    tokens = (torch.randint(LETTERS, (4, 1)) + torch.arange(24)).to(args.device) % LETTERS
    logits = model(tokens).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step:4}  loss {loss.item():.3f}")

model.eval()
found = decode(model, torch.arange(5, device=args.device)[None], 12)[0].tolist()
print(f"{package}: " + "".join(chr(ord("a") + letter) for letter in found))
for route, calls in route_counts().items():
    print(f"{calls:5} x {route.callable}: {route}")
sys.exit(0 if any(route.path == "native" for route in route_counts()) else 1)
