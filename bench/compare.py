"""Ferrum beside llama.cpp: the same GGUF file, the same threads, in turns.

Machines are noisy, so absolute figures say little. Each round runs both engines one after the other,
each in a process of its own, and the ratio is taken within the round; printed are the median of the
ratios and their spread. llama.cpp is the one that the `llama-cpp-python` package carries:

    pip install --no-binary llama-cpp-python llama-cpp-python numpy
    python bench/compare.py --ferrum target/release/ferrum MODEL.gguf...

Measured: a prompt (`pp`), decoding one sequence (`tg`), decoding several at once (`batch N`, tokens of
all of them), loading and the first token after a prompt of 16 (`start`, seconds), and peak memory.
llama.cpp picks no token after a step, and Ferrum does.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START_PROMPT = 16
Figures = dict[str, float]


def ferrum(binary: str, model: str, a: argparse.Namespace) -> Figures:
    def bench(*more: str) -> dict[str, Any]:
        command = [binary, "bench", "--json", "--model", model, "--repeat", "1", "--backend", "cpu"]
        done = subprocess.run([*command, "--threads", str(a.threads), *more], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(done.stdout)

    batches = ["--batch", ",".join(map(str, a.batch))] if a.batch else []
    result = bench("--prompt", str(a.prompt), "--gen", str(a.gen))
    figures = {
        f"pp{a.prompt}": result["prefill_tokens_per_s"],
        f"tg{a.gen}": result["decode_tokens_per_s"],
        "memory (MB)": result["peak_rss_bytes"] / 1e6,
        f"of the peak ({result['prefill_arithmetic']})": result["prefill_arithmetic_share"],
    }
    # There is none where a cache holds what a step reads.
    if result["decode_bandwidth_share"] is not None:
        figures["of the bandwidth"] = result["decode_bandwidth_share"]
    if batches:
        together = bench("--prompt", str(START_PROMPT), "--gen", str(a.batch_gen), *batches)["batched"]
        figures |= {f"batch {each['sequences']}": each["decode_tokens_per_s"] for each in together}
    start = bench("--prompt", str(START_PROMPT), "--gen", "1")
    return figures | {"start (s)": start["load_s"] + start["first_token_s"]}


class Llama:
    """A context of llama.cpp through its C interface."""

    def __init__(self, model: str, threads: int, context: int, sequences: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(quiet, None)
        self.quiet = quiet  # must outlive the library's use of it
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(max(512, sequences), 0, 1)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def close(self) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    def clear(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def step(self, rows: list[tuple[int, int, int]], logits_from: int) -> None:
        """Runs `(token, position, sequence)` rows; those from index `logits_from` on give logits."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i >= logits_from
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        self.lib.llama_synchronize(self.context)

    def prompt(self, length: int, sequence: int = 0) -> None:
        tokens = [(i * 7919 + sequence * 31 + 11) % self.vocab for i in range(length)]
        for first in range(0, length, 512):
            part = tokens[first : first + 512]
            rows = [(token, first + i, sequence) for i, token in enumerate(part)]
            self.step(rows, logits_from=length - 1 - first)

    def decode(self, start: int, count: int, sequences: int = 1) -> float:
        began = time.perf_counter()
        for i in range(count):
            self.step([((i * 104729 + s) % self.vocab, start + i, s) for s in range(sequences)], logits_from=0)
        return time.perf_counter() - began


def llama(model: str, a: argparse.Namespace) -> Figures:
    """Runs in a process of its own (`--worker`)."""
    began = time.perf_counter()
    engine = Llama(model, a.threads, a.prompt + a.gen, 1)
    engine.prompt(START_PROMPT)
    start = time.perf_counter() - began
    engine.clear()
    engine.prompt(a.prompt)
    engine.decode(a.prompt, 4)
    engine.clear()
    began = time.perf_counter()
    engine.prompt(a.prompt)
    prompt_s = time.perf_counter() - began
    figures = {
        f"pp{a.prompt}": a.prompt / prompt_s,
        f"tg{a.gen}": a.gen / engine.decode(a.prompt, a.gen),
        "memory (MB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "start (s)": start,
    }
    for n in a.batch:
        engine = Llama(model, a.threads, n * (START_PROMPT + a.batch_gen + 32), n)
        for sequence in range(n):
            engine.prompt(START_PROMPT, sequence)
        engine.decode(START_PROMPT, 2, n)
        figures[f"batch {n}"] = n * a.batch_gen / engine.decode(START_PROMPT + 2, a.batch_gen, n)
    return figures


def llama_process(model: str, a: argparse.Namespace, arguments: list[str]) -> Figures:
    done = subprocess.run([sys.executable, __file__, "--worker", *arguments, model], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def compare(model: str, a: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    rounds = []
    for i in range(a.rounds):
        sides = [lambda: ferrum(a.ferrum, model, a), lambda: llama_process(model, a, arguments)]
        order = (0, 1) if i % 2 == 0 else (1, 0)
        results: list[Figures] = [{}, {}]
        for side in order:
            results[side] = sides[side]()
        rounds.append(results)
        print(f"{Path(model).name}: round {i + 1} of {a.rounds}", file=sys.stderr)
    table = {}
    for name in rounds[0][0]:
        ours = [r[0][name] for r in rounds if r[0].get(name) is not None]
        row: dict[str, Any] = {"ferrum": statistics.median(ours) if ours else None}
        if name in rounds[0][1]:
            ratios = sorted(r[0][name] / r[1][name] for r in rounds)
            row |= {
                "llama.cpp": statistics.median(r[1][name] for r in rounds),
                "ratio": statistics.median(ratios),
                "from": ratios[0],
                "to": ratios[-1],
            }
        table[name] = row
    return table


def show(model: str, table: dict[str, Any]) -> None:
    print(f"\n{Path(model).name}\n{'':24}{'ferrum':>10}{'llama.cpp':>11}{'ratio':>8}   spread")
    for name, row in table.items():
        value = "-" if row["ferrum"] is None else f"{row['ferrum']:.2f}"
        line = f"{name:24}{value:>10}"
        if "ratio" in row:
            line += f"{row['llama.cpp']:11.2f}{row['ratio']:8.2f}   {row['from']:.2f}–{row['to']:.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--ferrum", default="target/release/ferrum", metavar="BINARY")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--gen", type=int, default=128, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="*", default=[4, 8, 16], help="sequences at once (default: 4 8 16)")
    parser.add_argument("--batch-gen", type=int, default=32, help="tokens of each of them (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        print(json.dumps(llama(a.models[0], a)))
        return
    arguments = ["--threads", a.threads, "--prompt", a.prompt, "--gen", a.gen, "--batch-gen", a.batch_gen]
    # `--batch` takes all that follow, so an option has to stand before the model.
    arguments = [str(x) for x in [*arguments, "--batch", *a.batch, "--rounds", 1]]
    tables = {model: compare(model, a, arguments) for model in a.models}
    if a.json:
        print(json.dumps(tables, indent=1))
    else:
        for model, table in tables.items():
            show(model, table)


if __name__ == "__main__":
    main()
