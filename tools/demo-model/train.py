"""Trains the demo model and writes `assets/demo/ferrum-demo.gguf`. One command, one seed, CPU only.

`corpus.py` makes the text, `model.py` is the network. The loss counts only what the model has
to say (answers, stories, tool calls), not the questions. The matrices are trained with Muon,
embeddings and norms with AdamW, both with a learning rate that falls to zero.
"""

import argparse
import math
import time
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F

import corpus
import gguf_io
import tokens
from model import Config, DemoModel

ROOT = Path(__file__).resolve().parents[2]


def encode(tokenizer, documents, context: int) -> list:
    """[(ids, said)] per document; `said[i]` is whether the model has to say token `i`."""
    out = []
    pieces = tokenizer.encode_batch_fast([text for d in documents for text, _ in d.pieces], add_special_tokens=False)
    pieces = iter(pieces)
    for d in documents:
        ids, said = [], []
        for _, mine in d.pieces:
            piece = next(pieces).ids
            ids += piece
            said += [mine] * len(piece)
        if len(ids) <= context and any(said[1:]):
            out.append((ids, said))
    return out


def batches(rng: Random, documents, tokens_per_batch: int):
    """Rows of similar length, padded to a multiple of 32: (ids, positions of targets, targets)."""
    documents = list(documents)
    rng.shuffle(documents)
    groups = []
    for at in range(0, len(documents), 4096):
        row = []
        for d in sorted(documents[at: at + 4096], key=lambda d: len(d[0])):
            width = math.ceil(len(d[0]) / 32) * 32
            if row and (len(row) + 1) * width > tokens_per_batch:
                groups.append(row)
                row = []
            row.append(d)
        groups.append(row)
    rng.shuffle(groups)
    return groups


def tensors(rows):
    width = math.ceil(max(len(ids) for ids, _ in rows) / 32) * 32
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mine = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, said) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mine[i, : len(row)] = torch.tensor(said)
    mine[:, 0] = False
    # The state at position p predicts token p + 1.
    flat = mine.view(-1).nonzero().squeeze(1)
    return ids, flat - 1, ids.view(-1)[flat]


def main():
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--out", type=Path, default=ROOT / "assets/demo/ferrum-demo.gguf")
    a.add_argument("--documents", type=int, default=64000)
    a.add_argument("--batch-tokens", type=int, default=6144)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--matrix-rate", type=float, default=5e-3)
    a.add_argument("--rate", type=float, default=3e-3)
    a.add_argument("--eager", action="store_true", help="do not compile (no C++ compiler needed, a third slower)")
    a = a.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    begin = time.time()
    c = Config()

    rng = Random(a.seed)
    documents = [corpus.training_document(rng) for _ in range(a.documents)]
    sample = documents[:20000]
    tokenizer = tokens.train(("".join(text for text, _ in d.pieces) for d in sample), c.vocab)
    data = encode(tokenizer, documents, c.context)
    steps = batches(rng, data, a.batch_tokens)
    print(f"{len(data)} documents, {sum(len(d[0]) for d in data) / 1e6:.1f} M tokens, "
          f"{sum(sum(d[1]) for d in data) / 1e6:.1f} M of them to learn, {len(steps)} steps, "
          f"vocabulary {tokenizer.get_vocab_size()}, {time.time() - begin:.0f} s", flush=True)
    assert tokenizer.get_vocab_size() == c.vocab

    model = DemoModel(c)
    print(f"{model.parameter_count()} parameters", flush=True)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=a.matrix_rate, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=a.rate, betas=(0.9, 0.98), weight_decay=0.0)

    def loss_of(ids, places, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model(ids, torch.bfloat16).flatten(0, 1)[places]
            logits = model.logits(hidden)
        return F.cross_entropy(logits.float(), targets)

    if not a.eager:
        for layer in model.model.layers:  # one graph serves all six
            layer.compile(dynamic=True)
    smooth = None
    for step, rows in enumerate(steps):
        done = step / len(steps)
        scale = min(1.0, (step + 1) / 50) * min(1.0, (1 - done) / 0.6)
        for optimizer, rate in ((muon, a.matrix_rate), (adam, a.rate)):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        loss = loss_of(*tensors(rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        if step % 50 == 0 or step + 1 == len(steps):
            print(f"step {step}/{len(steps)} loss {smooth:.4f} {time.time() - begin:.0f} s", flush=True)

    a.out.parent.mkdir(parents=True, exist_ok=True)
    gguf_io.write(a.out, model.state_dict(), c, tokenizer)
    print(f"wrote {a.out.name}, {a.out.stat().st_size} bytes, {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
