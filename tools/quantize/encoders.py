"""Speed and error of llama.cpp's encoders, one thread: what `cargo bench -p ferrum-quant --bench encode` prints of ours.

For each type the millions of weights that are encoded in a second (the best of five runs), without and with
importance, and the root mean square error in units of the numbers' own: of normal numbers, of Student's t with
4 degrees of freedom, and by importance with it. The numbers are drawn anew here, so errors differ from those of
the bench by some tenths of a percent; `errors.py` compares on the same numbers.

    encoders.py [TYPE...]

Needs llama-cpp-python, gguf and numpy. No test needs this script.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf.quants import dequantize

ROWS, COLS = 96, 3072
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
LIBRARY = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
LIBRARY.ggml_quantize_chunk.restype = ctypes.c_size_t
LIBRARY.ggml_quantize_chunk.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
]  # fmt: skip


def encode(ty: gguf.GGMLQuantizationType, x: np.ndarray, importance: np.ndarray | None, out: np.ndarray) -> None:
    weights = None if importance is None else importance.ctypes.data
    LIBRARY.ggml_quantize_chunk(ty.value, x.ctypes.data, out.ctypes.data, 0, ROWS, COLS, weights)


def error(ty: gguf.GGMLQuantizationType, x: np.ndarray, importance: np.ndarray | None, out: np.ndarray) -> float:
    encode(ty, x, importance, out)
    back = dequantize(out, ty).reshape(x.shape)
    w = np.ones(COLS) if importance is None else importance.astype(np.float64)
    return float(np.sqrt((w * np.square(x - back, dtype=np.float64)).sum() / (w * np.square(x, dtype=np.float64)).sum()))


def main() -> None:
    numbers = np.random.default_rng(1)
    normal = (0.02 * numbers.standard_normal((ROWS, COLS))).astype(np.float32)
    heavy = (0.02 * numbers.standard_t(4, (ROWS, COLS))).astype(np.float32)
    importance = np.square(numbers.standard_t(4, COLS)).astype(np.float32)
    print("type       Mw/s  with imp.   normal    heavy  heavy with imp.")
    for name in sys.argv[1:] or TYPES:
        ty = gguf.GGMLQuantizationType[name.upper()]
        block, size = gguf.GGML_QUANT_SIZES[ty]
        out = np.zeros((ROWS, COLS // block * size), np.uint8)
        speeds = []
        for weights in (None, importance):
            least = np.inf
            for _ in range(5):
                start = time.perf_counter()
                encode(ty, normal, weights, out)
                least = min(least, time.perf_counter() - start)
            speeds.append(normal.size / least / 1e6)
        errors = [error(ty, normal, None, out), error(ty, heavy, None, out), error(ty, heavy, importance, out)]
        print(f"{name:8} {speeds[0]:6.1f} {speeds[1]:6.1f}    {' '.join(f'{e:.6f}' for e in errors)}", flush=True)


if __name__ == "__main__":
    main()
