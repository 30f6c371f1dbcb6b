"""Tries a server of text encoders and a speech model with OpenAI's own client: `python tools/clients/encoders_client.py [FERRUM]`.

It serves the fixtures `bert` and `xlm-roberta-reranker` of `fixtures/encoders` and `fixtures/speech/whisper` with FERRUM (default:
target/release/ferrum); their expected vectors, scores and tokens are those of `transformers`. Needs the package `openai`;
without it the script says so and ends well.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

try:
    import openai
except ImportError:
    print("skipped: the package `openai` is not installed")
    sys.exit(0)

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "encoders"
PROGRAM = sys.argv[1] if len(sys.argv) > 1 else "target/release/ferrum"
SPEECH = FIXTURES.parent / "speech"
MODELS = [str(FIXTURES / name) for name in ["bert", "xlm-roberta-reranker"]] + [str(SPEECH / "whisper")]


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))


def embeddings(client):
    cases = json.loads((FIXTURES / "bert" / "expected.json").read_text())["texts"]
    for inputs in [[case["text"] for case in cases], [case["ids"] for case in cases]]:
        # The client asks for base64 and decodes it.
        answer = client.embeddings.create(model="bert", input=inputs)
        assert answer.usage.prompt_tokens == sum(len(case["ids"]) for case in cases)
        for entry, case in zip(answer.data, cases, strict=True):
            assert cosine(entry.embedding, case["mean"]) > 0.999999, case["text"]
    plain = client.embeddings.create(model="bert", input=cases[0]["text"], encoding_format="float", dimensions=7)
    assert len(plain.data[0].embedding) == 7


def rerank(client):
    for pair in json.loads((FIXTURES / "xlm-roberta-reranker" / "expected.json").read_text())["pairs"]:
        body = {"model": "xlm-roberta-reranker", "query": pair["query"], "documents": [pair["document"]]}
        answer = client.post("/rerank", body=body, cast_to=dict)
        score = 1 / (1 + math.exp(-pair["logits"][0]))
        assert abs(answer["results"][0]["relevance_score"] - score) < 1e-5, pair


def speech(client):
    expected = json.loads((SPEECH / "expected.json").read_text())
    with (SPEECH / "sentence.wav").open("rb") as file:
        whole = client.audio.transcriptions.create(
            model="whisper", file=file, language="en", response_format="verbose_json"
        )
    assert [part.tokens for part in whole.segments] == [part["tokens"] for part in expected["timed"]]
    for name in ["sentence.mp3", "sentence.flac", "sentence.ogg"]:
        text = client.audio.translations.create(model="whisper", file=SPEECH / name)
        assert isinstance(text.text, str)
    vtt = client.audio.transcriptions.create(model="whisper", file=SPEECH / "sentence.wav", response_format="vtt")
    assert vtt.startswith("WEBVTT"), vtt
    try:
        client.audio.transcriptions.create(model="whisper", file=Path(__file__))
    except openai.BadRequestError as error:
        assert error.param == "file", error.body
    else:
        raise AssertionError("a script was heard")


def refusals(client):
    chat = [{"role": "user", "content": "hi"}]
    for ask in [
        lambda: client.chat.completions.create(model="bert", messages=chat),
        lambda: client.completions.create(model="bert", prompt="hi"),
        lambda: client.responses.create(model="bert", input="hi"),
    ]:
        try:
            ask()
        except openai.BadRequestError as error:
            assert error.code == "unsupported_model" and error.param == "model", error.body
        else:
            raise AssertionError("an encoder chatted")
    for body in [{"input": []}, {"input": "cat " * 99}, {"input": "a", "dimensions": 1000}]:
        try:
            client.embeddings.create(model="bert", **body)
        except openai.BadRequestError:
            continue
        raise AssertionError(f"{body} went well")
    assert client.models.retrieve("bert").max_model_len == 24


def main():
    command = [PROGRAM, "serve", *MODELS, "--preload", "all", "--port", "0", "--log-level", "warn"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        for line in server.stderr:
            said += line
            if found := re.search(r"http://[0-9.:]+/v1", line):
                client = openai.OpenAI(base_url=found.group(), api_key="none", max_retries=0)
                break
        else:
            sys.exit(f"{PROGRAM} serve said no address: {said}")
        for test in [embeddings, rerank, speech, refusals]:
            test(client)
            print(f"{test.__name__}: fine")
    finally:
        server.terminate()
        server.wait(timeout=60)


main()
