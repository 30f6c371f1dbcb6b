"""Scores a running server with lm-eval, and the same model with lm-eval in transformers; all scores must agree.

    ferrum serve fixtures/models/llama3-untied --port 8000
    python tools/clients/lm_eval_client.py fixtures/models/llama3-untied [http://127.0.0.1:8000/v1/completions]

Needs the packages `lm-eval[api]`, `torch` and `transformers`; without them the script says so and ends well. The
tasks are made here, of the words that the fixtures' tokenizers know: multiple choice, perplexity and greedy answers.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import lm_eval  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(0)

MODEL = sys.argv[1]
URL = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000/v1/completions"
WORDS = "a the her and near saw ran big little red water ball fox house".split()
# Tokens of a context; shorter than the longest text, which is taken in windows. Of these lm-eval leaves two unused
# with a server, and none with transformers.
LENGTH = 96
# What f32 in another order does to a sum of log-probabilities.
TOLERANCE = 1e-4

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
"""
TASKS = {
    "choice": ("multiple_choice", """
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""),
    "text": ("loglikelihood_rolling", """
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""),
    "answer": ("generate_until", """
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, temperature: 0}
metric_list: [{metric: exact_match}]
"""),
}


def documents(name, rng):
    words = lambda n: " ".join(rng.choice(WORDS) for _ in range(n))
    if name == "text":
        return [{"text": words(n)} for n in (12, 40, 80, 160)]
    choices = lambda: [" " + words(rng.randint(1, 3)) for _ in range(4)]
    return [{"question": words(6), "choices": choices(), "answer": rng.randrange(4)} for _ in range(24)]


def write_tasks(folder):
    rng = random.Random(1)
    for name, (kind, rest) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in documents(name, rng)))
        head = TASK.format(name=name, data=data, kind=kind)
        (folder / f"{name}.yaml").write_text(head.lstrip() + rest.lstrip())


def evaluate(folder, model, arguments, tasks):
    """Scores by task and metric, and the samples' answers."""
    out = folder / model
    settings = ",".join(f"{key}={value}" for key, value in arguments.items())
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", settings]
    command += ["--include_path", str(folder), "--tasks", ",".join(tasks), "--output_path", str(out), "--log_samples"]
    command += ["--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    (results,) = out.rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    samples = {}
    for name in tasks:
        (lines,) = out.rglob(f"samples_{name}_*.jsonl")
        read = [json.loads(line) for line in lines.read_text().splitlines()]
        samples[name] = [each["filtered_resps"] for each in sorted(read, key=lambda each: each["doc_id"])]
    return scores, samples


def differences(a, b):
    """Of all numbers in two structures (lm-eval writes them as text); infinite where anything else differs."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for left, right in zip(a, b):
            yield from differences(left, right)
        return
    try:
        difference = abs(float(a) - float(b)) / max(1.0, abs(float(a)))
    except (TypeError, ValueError):
        difference = 0.0 if a == b else math.inf
    # What is no number agrees with nothing.
    yield math.inf if math.isnan(difference) else difference


def main():
    name = Path(MODEL).name
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_tasks(folder)
        api = {
            "model": name,
            "base_url": URL,
            "tokenizer": MODEL,
            "num_concurrent": 4,
            "max_retries": 1,
            "tokenized_requests": True,
            "max_length": LENGTH,
        }
        ours, our_samples = evaluate(folder, "local-completions", api, list(TASKS))
        hf = {"pretrained": MODEL, "dtype": "float32", "max_length": LENGTH - 2}
        theirs, their_samples = evaluate(folder, "hf", hf, list(TASKS))
    failed = False
    for task in TASKS:
        worst = max(differences(our_samples[task], their_samples[task]))
        failed |= worst > TOLERANCE
        shown = {key.split(",")[0]: (ours[task][key], theirs[task][key]) for key in ours[task] if key.endswith(",none")}
        shown = {key: pair for key, pair in shown.items() if "stderr" not in key}
        print(f"{'FAILED' if worst > TOLERANCE else 'ok':6} {task}: {len(our_samples[task])} samples differ by at most {worst:.1e}")
        for key, (our, their) in shown.items():
            print(f"         {key}: {our} here, {their} in transformers")
    sys.exit(failed)


main()
