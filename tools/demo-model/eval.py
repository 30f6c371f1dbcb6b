"""Examines `assets/demo/ferrum-demo.gguf` on held-out questions, with `transformers`, in f32.

The weights are those of the file, dequantised: what is measured is what ships. Prints a
Markdown table (for the README); `--samples` also writes the parity samples for the engine.
"""

import argparse
import json
import math
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import jinja2
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import chat
import corpus
import gguf_io
import limits
import stories
from train import ROOT, encode, tensors

SAMPLE_CHATS = [
    [("user", "Who are you?")],
    [("user", "What is 7 plus 5?")],
    [("user", "Count from 3 to 9.")],
    [("user", "Which is bigger, an ant or an elephant?")],
    [("system", "You are a helpful assistant."), ("user", "What color is a banana?")],
    [("user", "My name is Clara."), ("assistant", "Nice to meet you, Clara!"), ("user", "What is my name?")],
    [("user", "Tell me a story about a fox.")],
]
SAMPLE_TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Get the current weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "Name of the city"}}, "required": ["city"]}}}


def load(path):
    """The GGUF as a `LlamaForCausalLM`, with its tokenizer and its chat template."""
    weights, c, tokenizer, template = gguf_io.read(path)
    end = tokenizer.token_to_id(chat.END)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.ffn, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, max_position_embeddings=c.context,
        rms_norm_eps=c.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": c.rope_base}, tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(chat.PAD), eos_token_id=end, pad_token_id=tokenizer.token_to_id(chat.PAD)))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    model.tie_weights()
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = chat.dumps
    return model.float().eval(), tokenizer, environment.from_string(template)


class Server:
    """A running `ferrum serve`: its answers in place of those of `transformers`, many times faster."""

    def __init__(self, url: str):
        self.url = url.rstrip("/") + "/v1/completions"

    def answer(self, prompts, limit, how):
        seeds = torch.randint(2**31, (len(prompts),)).tolist()

        def one(prompt, seed):
            body = {"prompt": prompt, "max_tokens": limit, "seed": seed, "temperature": how.get("temperature", 0), "min_p": how.get("min_p", 0)}
            request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as reply:
                return json.load(reply)["choices"][0]["text"]

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(one, prompts, seeds))


def drawing(temperature: float, min_p: float) -> dict:
    if temperature == 0:
        return dict(do_sample=False)
    return dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0, min_p=min_p)


@torch.no_grad()
def answer(model, tokenizer, prompts, limit, how):
    """Continuations of many prompts at once, similar lengths together; `how` is what `drawing` gives."""
    if isinstance(model, Server):
        return model.answer(prompts, limit, how)
    ids = [e.ids for e in tokenizer.encode_batch(prompts, add_special_tokens=False)]
    out = [None] * len(ids)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for at in range(0, len(order), 64):
        rows = order[at: at + 64]
        width = max(len(ids[i]) for i in rows)
        batch = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for r, i in enumerate(rows):
            batch[r, width - len(ids[i]):] = torch.tensor(ids[i])
            mask[r, width - len(ids[i]):] = 1
        made = model.generate(batch, attention_mask=mask, max_new_tokens=limit, **how)
        for r, i in enumerate(rows):
            text = tokenizer.decode(made[r, width:].tolist(), skip_special_tokens=False)
            out[i] = text.split(chat.END)[0]
    return out


@torch.no_grad()
def perplexity(model, tokenizer, documents):
    total, count = 0.0, 0
    for d in encode(tokenizer, documents, 1024):
        ids, weights = tensors([d])
        losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        said = weights[0, 1:] == 1.0
        total += losses[said].sum().item()
        count += said.sum().item()
    return math.exp(total / count), count


@torch.no_grad()
def sample(model, tokenizer, prompt, limit=64):
    """One parity case, token by token without a cache, and how close its closest decision was."""
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    start, margin = len(ids), math.inf
    while len(ids) < start + limit:
        best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        ids.append(best.indices[0].item())
        if ids[-1] == tokenizer.token_to_id(chat.END):
            break
    return {"prompt": prompt, "prompt_tokens": ids[:start], "greedy_tokens": ids[start:],
            "text": tokenizer.decode(ids[start:], skip_special_tokens=True), "min_margin": round(margin, 4)}


def examine_turns(model, tokenizer, template, how, seed, count):
    """How well the questions of long conversations are answered, by turn, and the same questions asked alone.

    The model goes on from its own answers.
    """
    talks = corpus.long_talks(seed, count)
    prompt = lambda messages: template.render(messages=messages, add_generation_prompt=True)
    right = lambda e, text: e.right(text) if e.right else text == e.turns[-1]["content"]
    done, rows, wrong = [[] for _ in talks], [], []
    for turn in range(len(talks[0])):
        questions = [talk[turn].turns[0] for talk in talks]
        said = answer(model, tokenizer, [prompt([*before, q]) for before, q in zip(done, questions)], 220, how)
        good = [right(talk[turn], text) for talk, text in zip(talks, said)]
        # The last one asks for what the first one told.
        told = [talk[0].turns if turn + 1 == len(talk) else [] for talk in talks]
        alone = answer(model, tokenizer, [prompt([*before, q]) for before, q in zip(told, questions)], 220, how)
        rows.append((turn + 1, 100 * sum(good) / count, 100 * sum(right(talk[turn], text) for talk, text in zip(talks, alone)) / count))
        for i, (q, text) in enumerate(zip(questions, said)):
            if not good[i]:
                wrong.append(f"[turn {turn + 1}] {q['content']!r}\n    said     {text!r}\n    expected {talks[i][turn].turns[-1]['content']!r}")
            done[i] += [q, corpus.said(text)]
    print("| turn | right | asked alone |\n|---|---:|---:|")
    for row in rows:
        print("| {} | {:.1f} % | {:.1f} % |".format(*row))
    print("\n" + "\n".join(wrong[:12]))


def examine_outside(model, tokenizer, template, how):
    """How many requests that people may type, and that the model cannot serve, get an honest answer."""
    prompts = [template.render(messages=[corpus.user(q)], add_generation_prompt=True) for q in limits.PEOPLE_ASK]
    wrong = [(q, text) for q, text in zip(limits.PEOPLE_ASK, answer(model, tokenizer, prompts, 72, how)) if text not in limits.HONEST]
    print(f"requests outside of its world: {len(prompts) - len(wrong)} of {len(prompts)} answered honestly")
    print("\n".join(f"    {q!r}: {text!r}" for q, text in wrong) + "\n")


def examine_variety(model, tokenizer, template, how, seed, count):
    """How many requests for a story get two different ones from two draws, and how many of these are right."""
    rng = Random(f"variety {seed}")
    asked = [corpus.story(rng) for _ in range(count)]
    prompts = [template.render(messages=e.turns[:1], add_generation_prompt=True) for e in asked]
    one, two = (answer(model, tokenizer, prompts, 220, how) for _ in range(2))
    differ = sum(a != b for a, b in zip(one, two))
    right = sum(e.right(text) for texts in (one, two) for e, text in zip(asked, texts))
    print(f"stories drawn twice: {100 * differ / count:.1f} % of {count} pairs differ, {50 * right / count:.1f} % of the stories are right\n")


def write_samples(model, tokenizer, template, path):
    prompts = [template.render(messages=[{"role": r, "content": t} for r, t in turns], add_generation_prompt=True) for turns in SAMPLE_CHATS]
    prompts.append(template.render(messages=[{"role": "user", "content": "What is the weather in Paris?"}], tools=[SAMPLE_TOOL], add_generation_prompt=True))
    prompts.append("Once upon a time")
    cases = [sample(model, tokenizer, p) for p in prompts]
    ids = cases[0]["prompt_tokens"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].tolist()
    check = {"prompt_tokens": ids, "logits": [round(x, 5) for x in logits]}
    note = "greedy decoding in f32 over the dequantised weights; min_margin is the smallest gap between the best and the second logit"
    lines = ",\n".join("  " + json.dumps(c, ensure_ascii=False) for c in cases)
    path.write_text(f'{{"note": {json.dumps(note)},\n"cases": [\n{lines}\n],\n"logits_check": {json.dumps(check)}}}\n')
    for c in cases:
        print(f"{c['min_margin']:8.3f}  {c['text']!r}")


def main():
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--model", type=Path, default=ROOT / "assets/demo/ferrum-demo.gguf")
    a.add_argument("--per-category", type=int, default=100)
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--temperature", type=float, default=0.0, help="draw the answers instead of taking the likeliest tokens")
    a.add_argument("--min-p", type=float, default=gguf_io.MIN_P)
    a.add_argument("--turns", type=int, metavar="N", help="examine N conversations of six turns instead")
    a.add_argument("--samples", action="store_true", help="write samples.json beside the model")
    a.add_argument("--server", metavar="URL", help="let the `ferrum serve` at this address answer, which has to serve the same model")
    a.add_argument("--wrong", type=int, default=2, help="wrong answers to show per category")
    a = a.parse_args()
    torch.set_num_threads(a.threads)
    model, tokenizer, template = load(a.model)
    if a.samples:
        write_samples(model, tokenizer, template, a.model.with_name("samples.json"))

    answering = Server(a.server) if a.server else model
    how = drawing(a.temperature, a.min_p)
    torch.manual_seed(a.seed)
    if a.turns:
        return examine_turns(answering, tokenizer, template, how, a.seed, a.turns)

    examine_outside(answering, tokenizer, template, how)
    if a.temperature:
        examine_variety(answering, tokenizer, template, how, a.seed, a.per_category)

    documents = corpus.held_out_documents(a.seed, 400)
    value, count = perplexity(model, tokenizer, documents)
    rng = Random(f"stories {a.seed}")
    told, told_count = perplexity(model, tokenizer, [corpus.Document([(stories.write(rng) + chat.END, True)]) for _ in range(100)])
    print(f"perplexity of held-out answers {value:.3f} ({count} tokens), of new stories {told:.3f} ({told_count} tokens)\n")

    cases = corpus.examination(a.seed, a.per_category)
    prompts = [template.render(messages=c.messages, tools=c.tools, add_generation_prompt=True) if c.messages else c.expected for c in cases]
    for c, prompt in zip(cases, prompts):  # the template in the file and the training text agree
        assert not c.messages or prompt == "".join(text for text, _ in chat.render(c.messages, c.tools, generation_prompt=True))
    answers = [None] * len(cases)
    torch.manual_seed(a.seed)
    for long in (True, False):
        rows = [i for i, c in enumerate(cases) if c.category.startswith("stories") == long]
        for i, text in zip(rows, answer(answering, tokenizer, [prompts[i] for i in rows], 200 if long else 72, how)):
            answers[i] = text if cases[i].messages else prompts[i] + text

    score, wrong = {}, []
    for c, text in zip(cases, answers):
        right = c.right(text)
        n, ok = score.get(c.category, (0, 0))
        score[c.category] = (n + 1, ok + right)
        if not right and n - ok < a.wrong:
            wrong.append(f"[{c.category}] {c.messages[-1]['content'] if c.messages else ''!r}\n    said     {text!r}\n    expected {c.expected!r}")
    print("| category | cases | right |\n|---|---:|---:|")
    for category, (n, ok) in sorted(score.items()):
        print(f"| {category} | {n} | {100 * ok / n:.1f} % |")
    n, ok = map(sum, zip(*score.values()))
    print(f"| all | {n} | {100 * ok / n:.1f} % |\n")
    print("\n".join(wrong))


if __name__ == "__main__":
    main()
