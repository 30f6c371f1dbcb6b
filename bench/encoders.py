"""Ferrum's encoders beside those of `transformers`: the same weights, the same inputs, the same threads, in turns.

    pip install torch transformers safetensors numpy soundfile
    python bench/encoders.py --ferrum target/release/ferrum --text all-MiniLM-L6-v2 --speech fixtures/speech/whisper

`--text` takes a folder of a BERT or RoBERTa checkpoint and measures texts of 8 to 60 words: `transformers` in batches of 32 by
length, as `sentence-transformers` makes them. `--speech` takes a Whisper folder, whose tokenizer is kept, and measures a random
model of the shape of Whisper tiny with a decoder that writes next to nothing, so that what counts is its encoder.

Machines are noisy, so each round runs both, and the ratio is taken within the round; printed are the median of the ratios and
their spread, of wall time and of CPU time, which others on the machine disturb less. `--before` names an older binary of Ferrum, which each
round runs too. Of Ferrum's commands, the time with one input is taken from the time with all, so that neither start nor load counts.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import torch
import transformers

Cost = tuple[float, float]  # wall and CPU, seconds


def of_process(command: list[str], text: str | None = None) -> Cost:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def here(run: Callable[[], object]) -> Cost:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with torch.inference_mode():
        run()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def difference(all_inputs: Cost, one: Cost) -> Cost:
    return all_inputs[0] - one[0], all_inputs[1] - one[1]


def texts_of(folder: Path, count: int) -> list[str]:
    """Texts of words from the model's vocabulary."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    names = vocab if isinstance(vocab, dict) else (name for name, _ in vocab)
    words = sorted(name for name in names if name.isalpha() and name.isascii() and len(name) > 3)
    generator = random.Random(1)
    return [" ".join(generator.choices(words, k=generator.randint(8, 60))) for _ in range(count)]


def text_encoder(a: argparse.Namespace, folder: Path) -> tuple[Callable[[str], Cost], Callable[[], Cost]]:
    texts = texts_of(folder, a.texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    arguments = ["embed", str(folder), "--json", "--threads", str(a.threads), *a.flags]

    def ours(binary: str) -> Cost:
        command = [binary, *arguments]
        return difference(of_process(command, "\n".join(texts)), of_process(command, texts[0]))

    def run() -> None:
        order = sorted(texts, key=len, reverse=True)
        for start in range(0, len(order), 32):
            batch = tokenizer(order[start : start + 32], padding=True, truncation=True, return_tensors="pt")
            states = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).float()
            torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)

    return ours, lambda: here(run)


def speech_encoder(a: argparse.Namespace, source: Path, work: Path) -> tuple[Callable[[str], Cost], Callable[[], Cost]]:
    folder = work / "whisper"
    shutil.copytree(source, folder)
    torch.manual_seed(0)
    config = transformers.WhisperConfig.from_pretrained(source)
    config.update({
        "d_model": 384, "encoder_layers": 4, "decoder_layers": 1, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
        "encoder_ffn_dim": 1536, "decoder_ffn_dim": 64, "max_target_positions": 8,
    })
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    # What is generated is said in a file that no longer fits the model's positions.
    generation = json.loads((source / "generation_config.json").read_text())
    generation["max_length"] = 8
    (folder / "generation_config.json").write_text(json.dumps(generation))
    rate, seconds = 16_000, 30
    noise = np.random.default_rng(1).normal(0, 0.1, a.windows * seconds * rate).astype(np.float32)
    for name, samples in [("all.wav", noise), ("one.wav", noise[: seconds * rate])]:
        soundfile.write(work / name, samples, rate)
    extractor = transformers.WhisperFeatureExtractor()
    arguments = ["transcribe", str(folder), "--language", "en", "--no-timestamps", "--no-fallback", "--threads", str(a.threads), *a.flags]

    def ours(binary: str) -> Cost:
        command = [binary, *arguments]
        return difference(of_process([*command, str(work / "all.wav")]), of_process([*command, str(work / "one.wav")]))

    def run() -> None:
        for window in np.split(noise, a.windows)[1:]:
            features = extractor(window, sampling_rate=rate, return_tensors="pt").input_features
            model.model.encoder(features)

    return ours, lambda: here(run)


def compare(name: str, a: argparse.Namespace, ours: Callable[[str], Cost], theirs: Callable[[], Cost]) -> None:
    theirs()
    sides = {"transformers": theirs}
    if a.before:
        sides["before"] = lambda: ours(a.before)
    rounds = [(ours(a.ferrum), {side: run() for side, run in sides.items()}) for _ in range(a.rounds)]
    for side in sides:
        for i, what in enumerate(["wall", "CPU"]):
            ratios = sorted(other[side][i] / mine[i] for mine, other in rounds)
            mine = statistics.median(cost[i] for cost, _ in rounds)
            peer = statistics.median(other[side][i] for _, other in rounds)
            print(
                f"{name:8} {what:4} {statistics.median(ratios):5.2f} x {side} ({ratios[0]:.2f}–{ratios[-1]:.2f}); "
                f"{mine:.2f} s and {peer:.2f} s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ferrum", required=True, help="the binary")
    parser.add_argument("--before", help="an older binary, measured in the same rounds")
    parser.add_argument("--text", type=Path, help="folder of a text encoder")
    parser.add_argument("--speech", type=Path, help="folder of a Whisper model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("flags", nargs="*", help="more flags for Ferrum, behind --")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    transformers.utils.logging.set_verbosity_error()
    if a.text:
        compare("text", a, *text_encoder(a, a.text))
    if a.speech:
        with tempfile.TemporaryDirectory(prefix="ferrum-encoders-") as work:
            compare("speech", a, *speech_encoder(a, a.speech, Path(work)))


if __name__ == "__main__":
    main()
