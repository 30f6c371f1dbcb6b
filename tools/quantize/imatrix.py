"""Measures the importance of a small model's columns, for `compare.py --imatrix`.

Runs the text through the model with `transformers` and writes the mean squares of what each projection
is multiplied with, in the older format of `llama-imatrix`. That program is the one for large models.

    imatrix.py demo-f32.gguf text.txt imatrix.dat

Needs torch, transformers, accelerate, gguf and numpy. No test needs this script.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str | None:
    """Of a projection; the output's importance is left out, as `llama-imatrix` does."""
    if not name.startswith("model.layers."):
        return None
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{PARTS[part]}.weight" if part in PARTS else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()

    where = {"pretrained_model_name_or_path": str(args.model.parent), "gguf_file": args.model.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str):
        def hook(_module, inputs):
            rows = inputs[0].flatten(0, -2).double()
            sums[name] = sums.get(name, 0) + rows.square().sum(0)
            counts[name] = counts.get(name, 0) + len(rows)

        return hook

    for name, module in model.named_modules():
        if known := gguf_name(name):
            module.register_forward_pre_hook(watch(known))
    ids = AutoTokenizer.from_pretrained(**where)(args.text.read_text())["input_ids"]
    with torch.no_grad():
        for start in range(0, len(ids), args.window):
            model(torch.tensor([ids[start : start + args.window]]))

    out = struct.pack("<i", len(sums))
    for name, total in sums.items():
        values = (total / counts[name]).float().numpy().astype("<f4").tobytes()
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, len(values) // 4) + values
    args.out.write_bytes(out)


if __name__ == "__main__":
    main()
