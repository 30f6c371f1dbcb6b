"""Writing the trained network as a GGUF file (Q8_0 matrices, F32 norms), and reading it back."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q

import chat
import tokens
from model import Config

NAMES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}

# Two seeds tell two stories, and what has one answer is hardly touched (README, "How good it is").
TEMPERATURE, MIN_P = 0.7, 0.1


def tensor_names(layers: int) -> dict:
    """Hugging Face name to GGUF name. There is no output.weight: the embeddings are tied."""
    out = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for i in range(layers):
        out.update({f"model.layers.{i}.{hf}.weight": f"blk.{i}.{name}.weight" for hf, name in NAMES.items()})
    return out


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k matrix from the half-split RoPE order of Hugging Face to GGUF's pairs."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def deinterleave(w: np.ndarray, heads: int) -> np.ndarray:
    return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)


def rope_heads(name: str, c: Config):
    return c.heads if "q_proj" in name else c.kv_heads if "k_proj" in name else None


def write(path, weights: dict, c: Config, tokenizer) -> None:
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("ferrum-demo")
    w.add_description("A small chat model trained on generated text, to show the Ferrum engine at work")
    w.add_license("Apache-2.0")
    w.add_size_label(f"{sum(v.numel() for v in weights.values()) / 1e6:.1f}M")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_vocab_size(c.vocab)
    w.add_context_length(c.context)
    w.add_embedding_length(c.hidden)
    w.add_block_count(c.layers)
    w.add_feed_forward_length(c.ffn)
    w.add_head_count(c.heads)
    w.add_head_count_kv(c.kv_heads)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.norm_eps)
    w.add_rope_dimension_count(c.head_dim)
    w.add_rope_freq_base(c.rope_base)

    vocabulary, merges = tokens.parts(tokenizer)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(vocabulary)
    w.add_token_types([gguf.TokenType.CONTROL if t in chat.SPECIAL else gguf.TokenType.NORMAL for t in vocabulary])
    w.add_token_merges(merges)
    w.add_bos_token_id(vocabulary.index(chat.PAD))
    w.add_eos_token_id(vocabulary.index(chat.END))
    w.add_pad_token_id(vocabulary.index(chat.PAD))
    w.add_add_bos_token(False)
    w.add_chat_template(chat.TEMPLATE)
    w.add_sampling_temp(TEMPERATURE)
    w.add_sampling_min_p(MIN_P)

    for hf, name in tensor_names(c.layers).items():
        data = weights[hf].detach().float().numpy()
        if data.ndim == 1:
            w.add_tensor(name, data)
            continue
        if heads := rope_heads(hf, c):
            data = interleave(data, heads)
        w.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(data), Q.Q8_0), raw_dtype=Q.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def read(path):
    """(dequantised weights under Hugging Face names, Config, tokenizer, chat template)."""
    r = gguf.GGUFReader(path)
    value = lambda key: r.get_field(key).contents()
    c = Config(vocab=value("llama.vocab_size"), hidden=value("llama.embedding_length"), layers=value("llama.block_count"),
               heads=value("llama.attention.head_count"), kv_heads=value("llama.attention.head_count_kv"),
               head_dim=value("llama.attention.key_length"), ffn=value("llama.feed_forward_length"),
               context=value("llama.context_length"), rope_base=value("llama.rope.freq_base"),
               norm_eps=value("llama.attention.layer_norm_rms_epsilon"))
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in r.tensors}
    weights = {}
    for hf, name in tensor_names(c.layers).items():
        data = stored[name]
        if heads := rope_heads(hf, c):
            data = deinterleave(data, heads)
        weights[hf] = torch.from_numpy(np.array(data, dtype=np.float32))
    return weights, c, tokens.from_parts(value("tokenizer.ggml.tokens"), value("tokenizer.ggml.merges")), value("tokenizer.chat_template")
