"""Trains the demo model and writes `assets/demo/ferrum-demo.gguf`. One command, one seed, CPU only.

`corpus.py` makes the text, `model.py` is the network. What the model has to say (answers, stories,
tool calls) counts fully in the loss, the questions a little: they teach it the words. The matrices
are trained with Muon, embeddings and norms with AdamW, both with a learning rate that falls to zero.
The network is computed in bf16 where the CPU has instructions for it (AVX-512 BF16, AMX), else in f32:
without them, a CPU is thirty times slower in bf16. Weights, gradients and optimizers are f32.

Each worker is a process of one thread with a share of every step's documents. Products this small
gain less from two threads than from two processes that meet twice a step.
"""

import argparse
import ctypes
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
QUESTION_WEIGHT = 0.3


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


def padded(length: int) -> int:
    return math.ceil(length / 16) * 16


def split(documents, tokens_per_step: int) -> list:
    """Documents in their random order, cut into steps: each step sees short and long ones."""
    steps, count = [[]], 0
    for d in documents:
        if count + len(d[0]) > tokens_per_step:
            steps.append([])
            count = 0
        steps[-1].append(d)
        count += len(d[0])
    return steps


def parts(rows, tokens_per_part: int) -> list:
    """One step's documents in parts of similar length, so that little is padding."""
    out = []
    for d in sorted(rows, key=lambda d: len(d[0])):
        width = padded(len(d[0]))
        if not out or (len(out[-1]) + 1) * width > tokens_per_part or width > 2 * padded(len(out[-1][0][0])):
            out.append([])
        out[-1].append(d)
    return out


def tensors(rows):
    """ids and weights, both [documents, width]: the weight of a token says how much its loss counts."""
    width = padded(max(len(ids) for ids, _ in rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    weights = torch.zeros(len(rows), width)
    for i, (row, said) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        weights[i, : len(row)] = torch.where(torch.tensor(said), 1.0, QUESTION_WEIGHT)
    weights[:, 0] = 0.0
    return ids, weights


class Muon:
    """Momentum whose steps are made orthogonal (Jordan et al. 2024), in f32 and for equal shapes together.

    PyTorch has one too, but it computes in bf16.
    """

    def __init__(self, matrices, momentum=0.95, decay=0.02):
        self.momentum, self.decay = momentum, decay
        shapes = {}
        for p in matrices:
            shapes.setdefault(tuple(sorted(p.shape)), []).append(p)
        self.groups = [(ps, [torch.zeros_like(p) for p in ps]) for ps in shapes.values()]

    @torch.no_grad()
    def step(self, rate: float):
        for matrices, averages in self.groups:
            for p, m in zip(matrices, averages):
                m.lerp_(p.grad, 1 - self.momentum)
            x = torch.stack([_wide(torch.lerp(p.grad, m, self.momentum)) for p, m in zip(matrices, averages)])
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):
                square = x @ x.mT
                x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
            for p, direction in zip(matrices, x):
                # The size that AdamW's steps have (Liu et al. 2025, arXiv:2502.16982).
                step = direction if p.shape[0] <= p.shape[1] else direction.T
                p.mul_(1 - rate * self.decay).sub_(step, alpha=rate * 0.2 * max(p.shape) ** 0.5)


def _wide(x):
    return x if x.shape[0] <= x.shape[1] else x.T


def share(rows, rank: int, workers: int, tokens_per_part: int) -> list:
    """The parts of one step that are this worker's: the longest go round first."""
    load, mine = [0] * workers, []
    for part in sorted(parts(rows, tokens_per_part), key=lambda p: -len(p) * padded(len(p[-1][0]))):
        lightest = load.index(min(load))
        load[lightest] += len(part) * padded(len(part[-1][0]))
        if lightest == rank:
            mine.append(part)
    return mine


def bf16_is_fast() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


def keep_freed_memory() -> None:
    """Tells glibc not to hand every large tensor back to the kernel: clearing its pages anew costs a quarter of the time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def work(rank: int, a, model, save, steps, gradients, losses, barrier):
    """One worker's training: its share of each step's documents, then of the parameters to move.

    `gradients` [workers, parameters] and `losses` [workers] are in memory that all workers see, and
    so are the model's parameters.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_freed_memory()
    begin = time.time()
    bf16 = bf16_is_fast()
    parameters = list(model.parameters())
    mine, others, at = [], [], {}
    for n, p in model.named_parameters():
        at[p] = sum(q.numel() for q in at)
        (mine if p.dim() == 2 and "embed" not in n else others).append(p)
    mine = mine[rank:: a.workers]
    muon = Muon(mine)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    moved = mine + others if rank == 0 else mine
    smooth = None
    for step, rows in enumerate(steps):
        scale = min(1.0, (step + 1) / 40) * min(1.0, (1 - step / len(steps)) / 0.6)
        total = sum(1.0 if x else QUESTION_WEIGHT for _, said in rows for x in said[1:])
        loss = 0.0
        for part in share(rows, rank, a.workers, a.part_tokens):
            ids, weights = tensors(part)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model.logits(model(ids)[:, :-1]).flatten(0, 1)  # [documents * (width - 1), vocab]
            each = F.cross_entropy(logits.float(), ids[:, 1:].flatten(), reduction="none")
            of_part = each @ weights[:, 1:].flatten() / total
            of_part.backward()
            loss += of_part.item()
        losses[rank] = loss
        for p in parameters:
            gradients[rank, at[p]: at[p] + p.numel()] = 0.0 if p.grad is None else p.grad.flatten()
        barrier.wait()
        for p in moved:
            p.grad = gradients[:, at[p]: at[p] + p.numel()].sum(0).view_as(p)
        muon.step(a.matrix_rate * scale)
        if rank == 0:
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            adam.param_groups[0]["lr"] = a.rate * scale
            adam.step()
            loss = losses.sum().item()
            smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
            if step % 50 == 0 or step + 1 == len(steps):
                save()
                print(f"step {step}/{len(steps)} loss {smooth:.4f} {time.time() - begin:.0f} s", flush=True)
        model.zero_grad()
        barrier.wait()


def main():
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--out", type=Path, default=ROOT / "assets/demo/ferrum-demo.gguf")
    a.add_argument("--start", type=Path, help="go on from this model's weights, with its tokenizer")
    a.add_argument("--documents", type=int, default=20000)
    a.add_argument("--step-tokens", type=int, default=4096)
    a.add_argument("--part-tokens", type=int, default=2048)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    a.add_argument("--matrix-rate", type=float, default=6e-3)
    a.add_argument("--rate", type=float, default=3e-3)
    a = a.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(a.seed)
    begin = time.time()
    c = Config()

    rng = Random(a.seed)
    documents = [corpus.training_document(rng) for _ in range(a.documents)]
    weights = None
    if a.start:
        weights, c, tokenizer, _ = gguf_io.read(a.start)
    else:
        tokenizer = tokens.train(("".join(text for text, _ in d.pieces) for d in documents[:12000]), c.vocab)
    data = encode(tokenizer, documents, c.context)
    steps = split(data, a.step_tokens)
    print(f"{len(data)} documents, {sum(len(d[0]) for d in data) / 1e6:.1f} M tokens, "
          f"{sum(sum(d[1]) for d in data) / 1e6:.1f} M of them to say, {len(steps)} steps, {time.time() - begin:.0f} s", flush=True)
    assert tokenizer.get_vocab_size() == c.vocab

    model = DemoModel(c)
    if weights:
        model.load_state_dict(weights)
    print(f"{model.parameter_count()} parameters", flush=True)
    model.share_memory()
    fork = torch.multiprocessing.get_context("fork")
    gradients = torch.zeros(a.workers, model.parameter_count()).share_memory_()
    a.out.parent.mkdir(parents=True, exist_ok=True)
    save = lambda: gguf_io.write(a.out, model.state_dict(), c, tokenizer)
    together = (a, model, save, steps, gradients, torch.zeros(a.workers).share_memory_(), fork.Barrier(a.workers))
    rest = [fork.Process(target=work, args=(rank, *together), daemon=True) for rank in range(1, a.workers)]
    for process in rest:
        process.start()
    work(0, *together)

    print(f"wrote {a.out.name}, {a.out.stat().st_size} bytes, {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
