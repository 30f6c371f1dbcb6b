"""Compares the errors of weights under `ferrum quantize` and under llama.cpp's own quantiser.

For each type both make a file of the same float GGUF model; printed are the root mean square error of all
matrices in units of the numbers' own, ours over llama.cpp's, and how many of the quantised tensors are the
same byte for byte.

    errors.py --ferrum target/release/ferrum --model demo-f32.gguf

Needs llama-cpp-python, gguf and numpy. No test needs this script.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf.quants import dequantize

from compare import TYPES, ours, theirs


def matrices(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1}


def error(exact: dict[str, np.ndarray], found: dict[str, gguf.ReaderTensor]) -> float:
    misses = squares = 0.0
    for name, values in exact.items():
        back = dequantize(found[name].data, found[name].tensor_type)
        misses += np.square(values - back, dtype=np.float64).sum()
        squares += np.square(values, dtype=np.float64).sum()
    return float(np.sqrt(misses / squares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ferrum", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="GGUF in f32, f16 or bf16")
    parser.add_argument("--types", nargs="*", default=list(TYPES))
    args = parser.parse_args()
    silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silence, ctypes.c_void_p())

    exact = {name: dequantize(t.data, t.tensor_type) for name, t in matrices(args.model).items()}
    print("| type | Ferrum | llama.cpp | ratio | same bytes |")
    print("|---|---:|---:|---:|---:|")
    for name in args.types:
        with tempfile.TemporaryDirectory() as folder:
            files = Path(folder, "ours.gguf"), Path(folder, "theirs.gguf")
            ours(args.ferrum, args.model, files[0], name, None)
            theirs(args.model, files[1], TYPES[name], None)
            one, other = map(matrices, files)
            same = sum(np.array_equal(t.data, other[n].data) for n, t in one.items())
            a, b = error(exact, one), error(exact, other)
        print(f"| {name} | {a:.5f} | {b:.5f} | {a / max(b, 1e-30):.3f} | {same} of {len(one)} |", flush=True)


if __name__ == "__main__":
    main()
