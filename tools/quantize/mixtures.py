"""Compares the type that each tensor takes under `ferrum quantize` with llama.cpp's choice.

Makes small GGUF files of zeros whose shapes ask every rule of the mixtures: many layers, grouped
heads, tied tables, experts, fused projections, rows that are no multiple of 256 or of 32. Both
quantise them to every type; any tensor of another type is printed, and fails the run.

    mixtures.py --ferrum target/release/ferrum

Needs llama-cpp-python, gguf and numpy. No test needs this script; what it shows is held by the tests
of `recipe.rs`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from compare import TYPES, Importance, silence, theirs

VOCAB = 64


@dataclass
class Case:
    """A model as the rules see it."""

    name: str
    layers: int = 32
    width: int = 256
    feed: int = 512
    heads: int = 8
    kv_heads: int = 2
    experts: int = 0
    tied: bool = False
    fused: bool = False
    compressed: bool = False
    arch: str = "llama"


CASES = [
    Case("plain", kv_heads=8),
    Case("grouped"),
    Case("grouped by two, tied", kv_heads=4, tied=True),
    Case("odd layers", layers=29, tied=True),
    Case("few layers", layers=3),
    Case("one layer", layers=1),
    Case("eighty layers", layers=80, kv_heads=1),
    Case("eight experts", experts=8),
    Case("four experts", experts=4, arch="qwen3moe"),
    Case("many experts", experts=16, layers=28, arch="qwen3moe"),
    Case("fused qkv", fused=True, arch="phi3"),
    Case("compressed keys and values", compressed=True, layers=9),
    Case("fused qkv, eight experts", fused=True, experts=8, layers=9),
    Case("rows of 96", width=96, feed=96),
    Case("rows of 288", width=288, feed=288, tied=True),
    Case("rows of 48", width=48, feed=48),
    Case("feed-forward of 320", feed=320),
]


def write(case: Case, path: Path) -> None:
    out = gguf.GGUFWriter(path, case.arch)
    out.add_block_count(case.layers)
    out.add_context_length(64)
    out.add_embedding_length(case.width)
    out.add_feed_forward_length(case.feed)
    out.add_head_count(case.heads)
    out.add_head_count_kv(case.kv_heads)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(case.width // case.heads)
    out.add_vocab_size(VOCAB)
    out.add_tokenizer_model("none")
    if case.experts:
        out.add_expert_count(case.experts)
        out.add_expert_used_count(2)
        out.add_expert_feed_forward_length(case.feed)

    def tensor(name: str, *shape: int) -> None:
        out.add_tensor(name, np.zeros(shape, dtype=np.float16 if len(shape) > 1 else np.float32))

    kv = case.width // case.heads * case.kv_heads
    tensor("token_embd.weight", VOCAB, case.width)
    tensor("output_norm.weight", case.width)
    if not case.tied:
        tensor("output.weight", VOCAB, case.width)
    for i in range(case.layers):
        layer = f"blk.{i}."
        tensor(layer + "attn_norm.weight", case.width)
        tensor(layer + "ffn_norm.weight", case.width)
        if case.fused:
            tensor(layer + "attn_qkv.weight", case.width + 2 * kv, case.width)
        else:
            tensor(layer + "attn_q.weight", case.width, case.width)
            tensor(layer + "attn_k.weight", kv, case.width)
            tensor(layer + "attn_v.weight", kv, case.width)
            tensor(layer + "attn_q.bias", case.width)
        if case.compressed:
            tensor(layer + "attn_kv_b.weight", case.width, case.width)
        tensor(layer + "attn_output.weight", case.width, case.width)
        stack = [case.experts] if case.experts else []
        end = "_exps.weight" if case.experts else ".weight"
        if case.experts:
            out.add_tensor(layer + "ffn_gate_inp.weight", np.zeros((case.experts, case.width), dtype=np.float32))
        tensor(layer + "ffn_gate" + end, *stack, case.feed, case.width)
        tensor(layer + "ffn_up" + end, *stack, case.feed, case.width)
        tensor(layer + "ffn_down" + end, *stack, case.width, case.feed)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def importance(case: Path) -> Importance:
    tensors = {t.name: t for t in gguf.GGUFReader(case).tensors if len(t.shape) > 1}
    stacks = {name: int(t.shape[2]) if len(t.shape) > 2 else 1 for name, t in tensors.items()}
    return Importance({name: np.ones(int(t.shape[0]) * stacks[name], np.float32) for name, t in tensors.items()})


def differences(ferrum: Path, case: Case, folder: Path) -> list[str]:
    source, out = folder / "source.gguf", folder / "theirs.gguf"
    write(case, source)
    weights = importance(source)
    weights.write(folder / "imatrix.dat")
    found = []
    for name, ftype in TYPES.items():
        for imatrix in (None, weights):
            command = [ferrum, "quantize", source, folder / "never.gguf", "--type", name, "--dry-run", "--json"]
            command += ["--imatrix", folder / "imatrix.dat"] if imatrix else []
            plan = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            ours = {t["name"]: t["type"] for t in plan["tensors"]}
            try:
                theirs(source, out, ftype, imatrix)
            except RuntimeError as error:
                found.append(f"{case.name}: {name}: {error}")
                continue
            for t in gguf.GGUFReader(out).tensors:
                if ours.get(t.name) != t.tensor_type.name:
                    with_ = " with importance" if imatrix else ""
                    found.append(f"{case.name}: {name}{with_}: {t.name}: {ours.get(t.name)}, llama.cpp {t.tensor_type.name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ferrum", type=Path, required=True)
    args = parser.parse_args()
    silence()
    wrong = 0
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = differences(args.ferrum, case, Path(folder))
        print(f"{case.name}: {len(found)} differences in {len(TYPES)} types", flush=True)
        for line in found:
            print("  " + line)
        wrong += len(found)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
