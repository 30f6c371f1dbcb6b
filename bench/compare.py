"""Ferrum beside llama.cpp and ik_llama.cpp: the same GGUF file, the same threads, in turns.

Machines are noisy, so absolute figures say little. Each round runs all engines one after the other,
each in a process of its own, and the ratio is taken within the round; printed are the median of the
ratios and their spread. llama.cpp is the one that the `llama-cpp-python` package carries; ik_llama.cpp,
its fastest fork on CPUs, is measured with its own `llama-bench` and `llama-batched-bench`, as the file is
and with `-rtr 1` (weights repacked at load), and the better of both counts:

    pip install --no-binary llama-cpp-python llama-cpp-python numpy
    python bench/compare.py --ferrum target/release/ferrum --ik ik_llama.cpp/build/bin MODEL.gguf...

`--before BINARY` takes another build of Ferrum into the rounds, to show what a change does.

Measured: a prompt (`pp`), decoding one sequence (`tg`), decoding several at once (`batch N`, tokens of
all of them), loading and the first token after a prompt of 16 (`start`, seconds; `second start` with the
weights that the first one packed, in a cache that goes with the run), and peak memory. Neither peer picks
a token after a step, and Ferrum does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

START_PROMPT = 16
Figures = dict[str, float]


def ferrum(binary: str, model: str, a: argparse.Namespace) -> Figures:
    def bench(*more: str) -> dict[str, Any]:
        command = [binary, "bench", "--json", "--model", model, "--repeat", "1", "--backend", "cpu"]
        command += [] if "--weight-cache-dir" in more else ["--no-weight-cache"]
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
    with tempfile.TemporaryDirectory(prefix="ferrum-compare-") as cache:
        first = ["--prompt", str(START_PROMPT), "--gen", "1"]
        starts = [bench(*first), bench(*first, "--weight-cache-dir", cache), bench(*first, "--weight-cache-dir", cache)]
    packed, _, kept = (start["load_s"] + start["first_token_s"] for start in starts)
    figures["start (s)"] = packed
    # A small model is not kept.
    return figures | ({"second start (s)": kept} if starts[2]["weights_from"] == "cache" else {})


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
        "second start (s)": start,
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


def measured(command: list[str], of_stderr: bool = False) -> tuple[str, float, float]:
    """Output, seconds and peak memory in megabytes of a command."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    if of_stderr:
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    began = time.perf_counter()
    # ik_llama.cpp leaves a log where it runs.
    with subprocess.Popen(command, text=True, cwd=tempfile.gettempdir(), **streams) as process:
        stream = process.stdout or process.stderr
        output = stream.read() if stream else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    return output, time.perf_counter() - began, usage.ru_maxrss / 1e3


def ik_llama(folder: str, model: str, a: argparse.Namespace) -> Figures:
    """The better of both ways to load, figure by figure."""
    folder, model = str(Path(folder).resolve()), str(Path(model).resolve())

    def one_way(repack: bool) -> Figures:
        common = ["-m", model, "-t", str(a.threads)]
        bench = [f"{folder}/llama-bench", *common, "-rtr", str(int(repack)), "-r", "1", "-o", "json"]
        output, _, memory = measured([*bench, "-p", str(a.prompt), "-n", "0"])
        figures = {f"pp{a.prompt}": json.loads(output)[0]["avg_ts"], "memory (MB)": memory}
        output, _, _ = measured([*bench, "-p", "0", "-n", str(a.gen), "-gp", f"{a.prompt},{a.gen}"])
        figures[f"tg{a.gen}"] = json.loads(output)[-1]["avg_ts"]
        # The whole process: it does nothing else but load, and compute this prompt once.
        _, figures["start (s)"], _ = measured([*bench, "-w", "0", "-p", str(START_PROMPT), "-n", "0"])
        if a.batch:
            together = ["-npp", str(START_PROMPT), "-ntg", str(a.batch_gen), "-npl", ",".join(map(str, a.batch))]
            context = 2 * max(a.batch) * (START_PROMPT + a.batch_gen)
            command = [f"{folder}/llama-batched-bench", *common, *(["-rtr"] if repack else [])]
            command += ["-c", str(context), "-b", "512", "-ub", "512"]
            # Its table is part of the log.
            for line in measured([*command, *together], of_stderr=True)[0].splitlines():
                cells = [cell.strip() for cell in line.strip("|\n ").split("|")]
                if len(cells) == 10 and cells[2].isdigit():
                    figures[f"batch {cells[2]}"] = float(cells[7])
        return figures

    ways = [one_way(repack) for repack in (False, True)]
    smaller = ("start (s)", "memory (MB)")
    return {name: (min if name in smaller else max)(way[name] for way in ways) for name in ways[0]}


def compare(model: str, a: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    sides = {"ferrum": lambda: ferrum(a.ferrum, model, a)}
    if a.before:
        sides["before"] = lambda: ferrum(a.before, model, a)
    if importlib.util.find_spec("llama_cpp"):
        sides["llama.cpp"] = lambda: llama_process(model, a, arguments)
    else:
        print("note: the package llama-cpp-python is not installed, so llama.cpp is left out", file=sys.stderr)
    if a.ik:
        sides["ik_llama.cpp"] = lambda: ik_llama(a.ik, model, a)
    rounds = []
    for i in range(a.rounds):
        order = list(sides) if i % 2 == 0 else list(reversed(sides))
        rounds.append({side: sides[side]() for side in order})
        print(f"{Path(model).name}: round {i + 1} of {a.rounds}", file=sys.stderr)
    table = {}
    for name in rounds[0]["ferrum"]:
        ours = [r["ferrum"][name] for r in rounds if r["ferrum"].get(name) is not None]
        row: dict[str, Any] = {"ferrum": statistics.median(ours) if ours else None}
        for peer in list(sides)[1:]:
            # A cache of packed weights may be missing where a model is small.
            if any(r["ferrum"].get(name) is None or r[peer].get(name) is None for r in rounds):
                continue
            ratios = sorted(r["ferrum"][name] / r[peer][name] for r in rounds)
            row[peer] = {
                "figure": statistics.median(r[peer][name] for r in rounds),
                "ratio": statistics.median(ratios),
                "from": ratios[0],
                "to": ratios[-1],
            }
        table[name] = row
    return table


def show(model: str, table: dict[str, Any]) -> None:
    peers = [name for name in next(iter(table.values())) if name != "ferrum"]
    print(f"\n{Path(model).name}\n{'':24}{'ferrum':>10}", *(f"{peer:>14}{'ratio':>7}   spread   " for peer in peers))
    for name, row in table.items():
        value = "-" if row["ferrum"] is None else f"{row['ferrum']:.2f}"
        line = f"{name:24}{value:>10}"
        for peer in peers:
            if found := row.get(peer):
                line += f"{found['figure']:15.2f}{found['ratio']:7.2f}   {found['from']:.2f}–{found['to']:.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--ferrum", default="target/release/ferrum", metavar="BINARY")
    parser.add_argument("--before", metavar="BINARY", help="another build of Ferrum, measured in the same rounds")
    parser.add_argument("--ik", metavar="DIR", help="folder with the programs of ik_llama.cpp (default: without it)")
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
