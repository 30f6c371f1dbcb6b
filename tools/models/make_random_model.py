"""Writes a random-weight model of a real model's shape, for benchmarks.

Speed does not depend on what the weights are, so a benchmark needs no download: this makes a
model that has the exact shape, file layout and size of a well-known one, as a Hugging Face folder
(`--format hf`) or as a GGUF file (`--format gguf`). The same shape and seed give the same weights
in both formats, before rounding to the asked type.

Tensors are made and written one at a time, so memory stays at the size of the largest one. The
vocabulary is made up but complete, so text goes in and out. A shape is one row of `SHAPES`.

    make_random_model.py qwen3-0.6b OUT/qwen3-0.6b-bf16 --dtype bf16
    make_random_model.py qwen3-0.6b OUT/qwen3-0.6b-q8_0.gguf --format gguf --dtype q8_0

`--repeat` writes one block of random values again and again, as fast as the disk takes it: for models
of many gigabytes. `q4_k_m` (GGUF) and `gptq4` (Hugging Face: groups of 128, symmetric) exist only so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

sys.path.append(str(Path(__file__).resolve().parents[1] / "fixtures"))
import gguf_file  # noqa: E402
import synthetic_vocab  # noqa: E402

SCALE = 0.02
DTYPES = {
    "f32": Type.F32,
    "f16": Type.F16,
    "bf16": Type.BF16,
    "q8_0": Type.Q8_0,
    "q4_0": Type.Q4_0,
}
# Made of random codes, since the packages here have no encoder of them.
REPEATED = ("q4_k_m", "gptq4")
GPTQ_GROUP = 128
# Values of a block that is repeated: no multiple of a row, so that rows differ.
REPEATED_VALUES = 3 << 20
HF_DTYPES = {"f32": ("F32", "float32"), "f16": ("F16", "float16"), "bf16": ("BF16", "bfloat16")}


@dataclass(frozen=True)
class Shape:
    arch: gguf.MODEL_ARCH
    # config.json but for the rotary settings and what follows from the vocabulary.
    config: dict[str, Any]
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    qk_norm: bool = False
    qkv_bias: bool = False


SHAPES: dict[str, Shape] = {
    "qwen3-0.6b": Shape(
        gguf.MODEL_ARCH.QWEN3,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        rope_theta=1000000.0,
        qk_norm=True,
    ),
    "llama-3.2-1b": Shape(
        gguf.MODEL_ARCH.LLAMA,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama-3.1-8b": Shape(
        gguf.MODEL_ARCH.LLAMA,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen3-30b-a3b": Shape(
        gguf.MODEL_ARCH.QWEN3MOE,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
        rope_theta=1000000.0,
        qk_norm=True,
    ),
    # Not a released model: 0.84 billion parameters of which 0.18 are read per token, so that a
    # mixture of experts can be measured on a small machine (196 MB per token in Q8_0).
    "qwen3-moe-small": Shape(
        gguf.MODEL_ARCH.QWEN3MOE,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": 32768,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "moe_intermediate_size": 512,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": 20,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        rope_theta=1000000.0,
        qk_norm=True,
    ),
}

# Not a model: the vocabulary and the KV cache of Qwen3 0.6B with hardly any weights. What a process holds of it is what it
# holds beside weights.
SHAPES["qwen3-0.6b-thin"] = replace(
    SHAPES["qwen3-0.6b"], config={**SHAPES["qwen3-0.6b"].config, "hidden_size": 64, "intermediate_size": 128}
)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the plan. `parts` are the names of a stack's members, in order."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...] = field(default=())

    def values(self, seed: int) -> np.ndarray:
        if not self.parts:
            return random_values(self.name, self.shape, seed)
        stack = np.empty(self.shape, np.float32)
        for i, part in enumerate(self.parts):
            stack[i] = random_values(part, self.shape[1:], seed)
        return stack


def random_values(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """Each tensor has its own generator, so the order of writing does not matter."""
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = random.standard_normal(shape, dtype=np.float32)
    values *= SCALE
    return values


def plan(shape: Shape) -> Iterator[Tensor]:
    """All tensors, by their Hugging Face names; the experts of a layer as one stack."""
    c = shape.config
    hidden, head_dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    yield Tensor("model.embed_tokens.weight", (c["vocab_size"], hidden))
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield Tensor(f"{layer}.self_attn.{name}.weight", (rows, hidden))
            if shape.qkv_bias:
                yield Tensor(f"{layer}.self_attn.{name}.bias", (rows,))
        yield Tensor(f"{layer}.self_attn.o_proj.weight", (hidden, q))
        if shape.qk_norm:
            yield Tensor(f"{layer}.self_attn.q_norm.weight", (head_dim,))
            yield Tensor(f"{layer}.self_attn.k_norm.weight", (head_dim,))
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
        experts = c.get("num_experts")
        ffn = c["moe_intermediate_size"] if experts else c["intermediate_size"]
        if experts:
            yield Tensor(f"{layer}.mlp.gate.weight", (experts, hidden))
        for name, rows, columns in (
            ("gate_proj", ffn, hidden),
            ("up_proj", ffn, hidden),
            ("down_proj", hidden, ffn),
        ):
            if experts:
                parts = tuple(f"{layer}.mlp.experts.{e}.{name}.weight" for e in range(experts))
                yield Tensor(f"{layer}.mlp.experts.{name}.weight", (experts, rows, columns), parts)
            else:
                yield Tensor(f"{layer}.mlp.{name}.weight", (rows, columns))
    yield Tensor("model.norm.weight", (hidden,))
    if not c["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (c["vocab_size"], hidden))


@dataclass
class Weights:
    """The bytes of tensors: each with values of its own, or all from one block."""

    seed: int
    repeat: bool
    blocks: dict[Type, np.ndarray] = field(default_factory=dict)

    def encoded(self, tensor: Tensor, kind: Type, heads: int | None = None) -> np.ndarray:
        """`tensor` as `kind`; rows of `heads` heads in llama.cpp's order."""
        if not self.repeat or kind is Type.F32 and len(tensor.shape) == 1:
            values = tensor.values(self.seed)
            if heads is not None:
                values = gguf_file.halves_to_pairs(values, heads)
            return gguf.quantize(values, kind)
        data = np.resize(self.block(kind), byte_count(tensor.shape, kind))
        floats = {Type.F32: np.float32, Type.F16: np.float16}.get(kind)
        return data.view(floats) if floats else data

    def block(self, kind: Type) -> np.ndarray:
        if kind not in self.blocks:
            made = random_codes(kind) if kind in CODE_SCALES else encoded_block(kind)
            self.blocks[kind] = made.reshape(-1).view(np.uint8)
        return self.blocks[kind]


# Of ggml's blocks of 256: where f16 scales lie, and which give weights like the others.
CODE_SCALES = {Type.Q4_K: [(0, 1e-4), (2, 7e-4)], Type.Q6_K: [(208, 1.5e-5)]}


def random_codes(kind: Type) -> np.ndarray:
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (REPEATED_VALUES // values, size), np.uint8)
    for offset, scale in CODE_SCALES[kind]:
        blocks[:, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks


def encoded_block(kind: Type) -> np.ndarray:
    return gguf.quantize(random_values("block", (REPEATED_VALUES // 256, 256), 0), kind)


def byte_count(shape: Sequence[int], kind: Type) -> int:
    return int(np.prod(gguf.quant_shape_to_byte_shape(tuple(shape), kind)))


def hf_tensors(shape: Shape, dtype: str, weights: Weights) -> Iterator[tuple[str, str, list[int], Callable]]:
    """Name, dtype, shape and maker of the bytes of each tensor of a Hugging Face file."""
    for stack in plan(shape):
        for name in stack.parts or (stack.name,):
            size = list(stack.shape[1:] if stack.parts else stack.shape)
            kept = len(size) == 1 or name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"))
            if dtype == "gptq4" and not kept:
                yield from gptq_tensors(name.removesuffix(".weight"), size, weights)
                continue
            stored = "f16" if dtype == "gptq4" else dtype
            tensor = Tensor(name, tuple(size))
            yield name, HF_DTYPES[stored][0], size, partial(weights.encoded, tensor, DTYPES[stored])


def gptq_tensors(layer: str, size: list[int], weights: Weights) -> Iterator[tuple[str, str, list[int], Callable]]:
    rows, columns = size
    groups = columns // GPTQ_GROUP
    codes = weights.block(Type.Q4_K)
    yield f"{layer}.qweight", "I32", [columns // 8, rows], lambda: np.resize(codes, rows * columns // 2)
    yield f"{layer}.qzeros", "I32", [groups, rows // 8], lambda: np.full(groups * rows // 2, 0x77, np.uint8)
    yield f"{layer}.scales", "F16", [groups, rows], lambda: np.full(groups * rows, 0.004, np.float16)
    yield f"{layer}.g_idx", "I32", [columns], lambda: np.arange(columns, dtype=np.int32) // GPTQ_GROUP


def write_hf(shape: Shape, folder: Path, dtype: str, weights: Weights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    vocab = synthetic_vocab.build(shape.config["vocab_size"])
    tokens = {"bos_token_id": vocab.bos_id, "eos_token_id": vocab.eos_id}
    config = {
        **shape.config,
        **tokens,
        "hidden_act": "silu",
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "torch_dtype": "float16" if dtype == "gptq4" else HF_DTYPES[dtype][1],
    }
    if dtype == "gptq4":
        config["quantization_config"] = {
            "quant_method": "gptq", "bits": 4, "group_size": GPTQ_GROUP, "sym": True, "desc_act": False,
            "checkpoint_format": "gptq",
        }  # fmt: skip
    folder.joinpath("config.json").write_text(json.dumps(config, indent=2) + "\n")
    folder.joinpath("generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")
    synthetic_vocab.write_tokenizer_files(vocab, folder)

    tensors = list(hf_tensors(shape, dtype, weights))
    widths = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, stored, size, _ in tensors:
        end = offset + widths[stored] * int(np.prod(size))
        header[name] = {"dtype": stored, "shape": size, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the data is aligned
    with folder.joinpath("model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for *_, data in tensors:
            file.write(data().data)


def k_mix(name: str, layers: int) -> Type:
    """llama.cpp's mix of types for Q4_K_M."""
    found = re.match(r"blk\.(\d+)\.(attn_v|ffn_down(_exps)?)\.weight$", name)
    if name == "output.weight":
        return Type.Q6_K
    if not found:
        return Type.Q4_K
    i, eighth = int(found[1]), layers // 8
    more = i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2
    return Type.Q6_K if more else Type.Q4_K


def write_gguf(shape: Shape, path: Path, dtype: str, weights: Weights) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file_type = Type.Q4_K if dtype == "q4_k_m" else DTYPES[dtype]
    scaling = shape.rope_scaling or {"rope_type": "default"}
    config = {**shape.config, "rope_parameters": {**scaling, "rope_theta": shape.rope_theta}}
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[shape.arch])
    writer.add_name(path.stem)
    gguf_file.write_metadata(writer, config, file_type)
    gguf_file.write_vocab(writer, synthetic_vocab.build(config["vocab_size"]))

    tensors = list(plan(shape))
    extra = dict(gguf_file.convert(shape.arch, config, {}))  # rope_freqs
    for name, values in extra.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes, raw_dtype=Type.F32)
    names = gguf.get_tensor_name_map(shape.arch, layers)
    kinds = []
    for tensor in tensors:
        name = gguf_file.name_of(tensor.name, names)
        kind = gguf_file.stored_type(name, len(tensor.shape), file_type)
        if dtype == "q4_k_m" and kind is file_type:
            kind = k_mix(name, layers)
        # The writer wants the shape in the units of the numpy array that will hold the data.
        floats = {Type.F32: np.float32, Type.F16: np.float16}.get(kind)
        array_shape = tensor.shape if floats else gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        size = byte_count(tensor.shape, kind)
        writer.add_tensor_info(name, array_shape, np.dtype(floats or np.uint8), size, kind)
        kinds.append(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in extra.values():
        writer.write_tensor_data(values)
    for tensor, kind in zip(tensors, kinds, strict=True):
        heads = gguf_file.heads_to_permute(writer.arch, tensor.name, config)
        writer.write_tensor_data(weights.encoded(tensor, kind, heads))
    writer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path, help="folder to write (hf) or file to write (gguf)")
    parser.add_argument("--format", choices=("hf", "gguf"), default="hf")
    parser.add_argument("--dtype", choices=(*DTYPES, *REPEATED), default="bf16")
    parser.add_argument("--repeat", action="store_true", help="one block of random values for all tensors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="layers, if not as many as the model has")
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    if options.layers is not None:
        shape = replace(shape, config={**shape.config, "num_hidden_layers": options.layers})
    if options.dtype in REPEATED and not options.repeat:
        parser.error(f"{options.dtype} is made of random codes; hint: add --repeat")
    weights = Weights(options.seed, options.repeat)
    if options.format == "gguf" and options.dtype != "gptq4":
        write_gguf(shape, options.out, options.dtype, weights)
    elif options.format == "hf" and (options.dtype in HF_DTYPES or options.dtype == "gptq4"):
        write_hf(shape, options.out, options.dtype, weights)
    elif options.format == "gguf":
        parser.error("a GGUF file cannot hold gptq4; hint: use --format hf")
    else:
        parser.error(f"a Hugging Face folder cannot hold {options.dtype}; hint: use --format gguf")
    print(options.out)


if __name__ == "__main__":
    main()
