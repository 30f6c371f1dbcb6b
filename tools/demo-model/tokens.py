"""The tokenizer: byte-level BPE with the pre-tokenizer of Qwen2, which splits numbers into digits."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import chat

QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def _around(bpe: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts, vocab: int) -> Tokenizer:
    tokenizer = _around(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=chat.SPECIAL, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def from_parts(tokens: list, merges: list) -> Tokenizer:
    """The same tokenizer out of the lists a GGUF file stores."""
    vocab = {t: i for i, t in enumerate(tokens)}
    tokenizer = _around(models.BPE(vocab=vocab, merges=[tuple(m.split(" ")) for m in merges]))
    tokenizer.add_special_tokens(chat.SPECIAL)
    return tokenizer


def parts(tokenizer: Tokenizer):
    """(tokens in id order, merges) as GGUF wants them."""
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = [t for t, _ in sorted(model["vocab"].items(), key=lambda kv: kv[1])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return tokens, merges
