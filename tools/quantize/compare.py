r"""Compares `ferrum quantize` with llama.cpp's own quantiser, by llama.cpp's own arithmetic.

For each type llama.cpp and each of our searches make a file of the same float GGUF model. llama.cpp loads
each file and computes the logits of a text; the figures are the seconds that the making took, the mean KL
divergence from the float model's logits (nats per token), its difference from llama.cpp's, and how often the
most likely token is the same. The difference has the standard error of the differences at each token, which
is far below that of either: both meet the same hard tokens. That llama.cpp loads our files at all, and that
they have the size of its own, is checked by the way. Without a text only seconds are printed; each maker has
a turn in each of `--rounds`, and the least is taken.

    compare.py --ferrum target/release/ferrum --model demo-f32.gguf --text text.txt
    compare.py --ferrum target/release/ferrum --model qwen3-0.6b-bf16.gguf --rounds 3

Needs llama-cpp-python and numpy. A float model of the demo model, and a text that it was not trained on:

    ferrum quantize assets/demo/ferrum-demo.gguf demo-f32.gguf --type f32 --requantize
    (cd tools/demo-model && python -c "import corpus; [print(p[0], end='') for d in \
        corpus.held_out_documents(7, 400) for p in d.pieces]") > text.txt

No test needs this script.
"""

from __future__ import annotations

import argparse
import ctypes
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np

SEARCHES = ("fast", "thorough")

# Our name: llama.cpp's `llama_ftype`.
TYPES = {
    "bf16": 32, "f16": 1, "q8_0": 7, "q6_k": 18, "q5_k_m": 17, "q5_k_s": 16, "q5_1": 9, "q5_0": 8,
    "q4_k_m": 15, "q4_k_s": 14, "q4_1": 3, "q4_0": 2, "iq4_nl": 25, "iq4_xs": 30, "mxfp4_moe": 38,
    "q3_k_l": 13, "q3_k_m": 12, "q3_k_s": 11, "q2_k": 10,
}  # fmt: skip


@dataclass
class Importance:
    """Mean squares of activations by weight."""

    columns: dict[str, np.ndarray]

    @staticmethod
    def read(path: Path) -> Importance:
        data, columns = path.read_bytes(), {}
        (count,), at = struct.unpack_from("<i", data), 4
        for _ in range(count):
            (length,) = struct.unpack_from("<i", data, at)
            name = data[at + 4 : at + 4 + length].decode()
            calls, values = struct.unpack_from("<ii", data, at + 4 + length)
            at += 12 + length
            columns[name] = np.frombuffer(data, np.float32, values, at) / max(calls, 1)
            at += 4 * values
        return Importance(columns)

    def write(self, path: Path) -> None:
        out = struct.pack("<i", len(self.columns))
        for name, values in self.columns.items():
            out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, len(values))
            out += values.astype("<f4").tobytes()
        path.write_bytes(out)


def silence() -> None:
    """Keeps llama.cpp from logging each tensor."""
    silence.callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silence.callback, ctypes.c_void_p())


def theirs(source: Path, out: Path, ftype: int, imatrix: Importance | None, threads: int = 2) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    params.nthread = threads
    params.allow_requantize = True
    if imatrix is not None:
        # A list that ends with an empty entry; `kept` holds the memory until the call returns.
        kept = {name.encode(): np.ascontiguousarray(v, np.float32) for name, v in imatrix.columns.items()}
        entries = (llama_cpp.llama_model_imatrix_data * (len(kept) + 1))()
        for entry, (name, values) in zip(entries, kept.items(), strict=False):
            entry.name, entry.size = name, len(values)
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), params) != 0:
        raise RuntimeError(f"llama.cpp could not quantise to type {ftype}")


def ours(
    ferrum: Path, source: Path, out: Path, name: str, imatrix: Path | None, search: str, threads: int = 2
) -> None:
    command = [ferrum, "quantize", source, out, "--type", name, "--search", search, "--threads", str(threads)]
    command += ["--force"]
    if imatrix is not None:
        command += ["--imatrix", imatrix]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def log_probabilities(model: Path, text: str, a: argparse.Namespace) -> np.ndarray:
    """Of every position of the text, cut into windows: [positions, vocabulary]."""
    llm = llama_cpp.Llama(
        str(model), n_ctx=a.window, n_batch=a.window, logits_all=True, verbose=False,
        n_threads=a.threads, n_threads_batch=a.threads,
    )  # fmt: skip
    ids = llm.tokenize(text.encode(), add_bos=False, special=True)[: a.tokens]
    rows = []
    for start in range(0, len(ids), a.window):
        part = ids[start : start + a.window]
        llm.reset()
        llm.eval(part)
        rows.append(np.array(llm.scores[: len(part)], dtype=np.float32))
    llm.close()
    logits = np.concatenate(rows)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits, dtype=np.float64).sum(axis=1, keepdims=True)).astype(np.float32)
    return logits


def divergences(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL divergence at each position."""
    return (np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64)


def error(values: np.ndarray) -> float:
    """Standard error of the mean."""
    return values.std() / np.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ferrum", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="GGUF in f32, f16 or bf16")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--types", nargs="*", default=list(TYPES))
    parser.add_argument("--imatrix", type=Path, help="in the older format")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()

    silence()
    text = args.text.read_text() if args.text else None
    imatrix = Importance.read(args.imatrix) if args.imatrix else None
    exact = log_probabilities(args.model, text, args) if text else None
    makers = [*SEARCHES, "llama.cpp"]
    columns = ["type", *(f"seconds, {m}" for m in makers)]
    if exact is not None:
        print(f"{len(exact)} tokens; KL divergence from {args.model.name} in nats")
        columns += [f"KL, {m}" for m in makers] + [f"difference, {m}" for m in SEARCHES]
        columns += [f"same best, {m}" for m in makers]
    print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    for name in args.types:
        with tempfile.TemporaryDirectory(dir=args.model.parent) as folder:
            files = {m: Path(folder, f"{m}.gguf") for m in makers}
            times: dict[str, list[float]] = {m: [] for m in makers}
            for _ in range(args.rounds):
                for m in makers:
                    start = time.perf_counter()
                    if m in SEARCHES:
                        ours(args.ferrum, args.model, files[m], name, args.imatrix, m, args.threads)
                    else:
                        theirs(args.model, files[m], TYPES[name], imatrix, args.threads)
                    times[m].append(time.perf_counter() - start)
            cells = [f"{min(times[m]):.1f}" for m in makers]
            found = [log_probabilities(file, text, args) for file in files.values()] if text else []
            sizes = {f.stat().st_size for f in files.values()}
        if found:
            each = [divergences(exact, q) for q in found]
            cells += [f"{kl.mean():.3e}" for kl in each]
            for kl in each[:-1]:
                difference = kl - each[-1]
                cells += [f"{difference.mean():+.1e} ± {error(difference):.0e}"]
            cells += [f"{100 * (exact.argmax(axis=1) == q.argmax(axis=1)).mean():.2f} %" for q in found]
        note = "" if len(sizes) == 1 else f" sizes differ: {sizes}"
        print(f"| {name} | {' | '.join(cells)} |{note}", flush=True)


if __name__ == "__main__":
    main()
