"""Replicas of `ferrum serve` on a Ray cluster, behind one address with OpenAI's routes.

    pip install 'ray[serve]' httpx
    FERRUM_MODEL=/models/qwen3-8b.gguf serve run ferrum_ray:app
    # or, with all settings in a file:  serve deploy config.yaml

Ray Serve starts, watches, scales and replaces the replicas; each is an actor with one `ferrum serve` beside it. The ingress
forwards requests as they are and answers as they come. It knows three things of them: where they begin, so that
conversations go to the replica whose prefix cache has them; whether they ask for a stream; and what to say when a replica
is gone in the middle of one. A request of whose answer nothing has come is sent to another replica; one whose answer has
begun is not, for it may have been read.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve
from ray.exceptions import RayError

# What a prefix is told apart by. Conversations that begin alike share the key of their beginning.
PREFIX_BYTES = 512
# Prefixes that a replica is remembered for; more than its cache holds at once.
PREFIXES = 1024
# How often a request of whose answer nothing has come is sent.
ATTEMPTS = 5
START_SECONDS = float(os.environ.get("FERRUM_START_SECONDS", "600"))
# Headers that belong to one connection.
HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "te", "upgrade"}


def with_parent(parent):
    """Ends the server with its actor, however that ends (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


@serve.deployment
class Replica:
    """One `ferrum serve` on a port of its own."""

    def __init__(self, binary: str, model: str | None, flags: list[str]):
        command = [binary, "serve", "--host", "127.0.0.1", "--port", "0", "--log-format", "json"]
        command += [model] if model else []
        parent = os.getpid()
        self.process = subprocess.Popen(
            command + flags,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: with_parent(parent),
        )
        self.url = self.address()
        threading.Thread(target=self.pass_on, daemon=True).start()
        limits = httpx.Limits(max_connections=None)
        # An answer takes as long as it takes; that the server lives is asked elsewhere.
        timeout = httpx.Timeout(10, read=None)
        self.client = httpx.AsyncClient(base_url=self.url, limits=limits, timeout=timeout)

    def address(self) -> str:
        """What the server says when it is ready."""
        said = []
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.start()
        try:
            for line in self.process.stderr:
                said.append(line)
                try:
                    base = json.loads(line).get("api_base")
                except (ValueError, AttributeError):
                    continue
                if base:
                    return base.removesuffix("/v1")
        finally:
            timer.cancel()
        raise RuntimeError("ferrum serve did not start: " + "".join(said[-5:]))

    def pass_on(self):
        for line in self.process.stderr:
            sys.stderr.write(line)
        # Without its server an actor is of no use, and Ray sees the end of one sooner than a bad health. What was begun
        # is told first.
        self.process.wait()
        time.sleep(0.5)
        os._exit(1)

    async def check_health(self):
        """Asked by Ray; an error has the replica replaced."""
        status = self.process.poll()
        if status is not None:
            raise RuntimeError(f"ferrum serve has ended with status {status}")
        answer = await self.client.get("/health", timeout=5)
        if answer.status_code != 200:
            raise RuntimeError(f"ferrum serve is not healthy: {answer.text}")

    @serve.multiplexed(max_num_models_per_replica=PREFIXES)
    async def prefix(self, key: str) -> str:
        """Ray sends requests with a key to a replica that has had it, unless that has too much to do."""
        return key

    async def forward(self, method: str, path: str, headers: dict, body: bytes):
        """Status and headers, and then the body as it comes."""
        key = serve.get_multiplexed_model_id()
        if key:
            await self.prefix(key)
        request = self.client.build_request(method, path, headers=headers, content=body)
        answer = await self.client.send(request, stream=True)
        try:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP}
            yield answer.status_code, kept
            async for chunk in answer.aiter_raw():
                yield chunk
        finally:
            # A client that went away ends the computation, too.
            await answer.aclose()

    def __del__(self):
        process = getattr(self, "process", None)
        if process and process.poll() is None:
            # It drains what it has begun.
            process.terminate()


def prefix_key(path: str, body: bytes) -> str:
    """What a request's prompt begins with, shortened; empty for one without a prompt."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    start = fields.get("messages") or fields.get("prompt") or fields.get("input") or ""
    system = fields.get("system") or fields.get("instructions") or ""
    text = json.dumps([fields.get("model"), system, start], ensure_ascii=False)
    beginning = text.encode()[:PREFIX_BYTES]
    return hashlib.blake2b(beginning, digest_size=12).hexdigest() if start else ""


def failure(error: Exception) -> dict:
    """What is said of a request whose replica is gone, as the routes say what goes wrong."""
    message = f"the replica that computed this answer is gone ({type(error).__name__})"
    return {"error": {"message": message, "type": "replica_error", "code": "replica_gone"}}


api = FastAPI(openapi_url=None)


@serve.deployment
@serve.ingress(api)
class Ingress:
    """Forwards each request to a replica."""

    def __init__(self, replicas):
        self.replicas = replicas

    @api.api_route("/{path:path}", methods=["GET", "POST", "DELETE", "HEAD", "OPTIONS"])
    async def any(self, path: str, request: Request):
        body = await request.body()
        target = request.url.path + ("?" + request.url.query if request.url.query else "")
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        key = prefix_key(path, body)
        for attempt in range(ATTEMPTS):
            handle = self.replicas.options(
                stream=True, method_name="forward", multiplexed_model_id=key
            )
            parts = aiter(handle.remote(request.method, target, headers, body))
            try:
                status, kept = await anext(parts)
                break
            except (RayError, httpx.HTTPError) as error:
                if attempt + 1 == ATTEMPTS:
                    return JSONResponse(failure(error), status_code=503)
            # Anywhere but where others of its kind went, once that is known to be gone.
            key = ""
            await asyncio.sleep(0.2 * 2**attempt)
        if kept.get("content-type", "").startswith("text/event-stream"):
            return StreamingResponse(self.events(parts), status, kept)
        try:
            # Whole or not at all: half of an answer is none.
            whole = b"".join([chunk async for chunk in parts])
        except (RayError, httpx.HTTPError) as error:
            return JSONResponse(failure(error), status_code=503)
        return StreamingResponse(iter([whole]), status, kept)

    async def events(self, parts):
        try:
            async for chunk in parts:
                yield chunk
        except (RayError, httpx.HTTPError) as error:
            # The status has been sent. The stream ends with an error in place of [DONE].
            event = json.dumps(failure(error))
            yield f"\n\nevent: error\ndata: {event}\n\n".encode()


def build(args: dict) -> serve.Application:
    """The application, by the `args` of a Serve config file; what is not there comes from the environment."""
    environment = os.environ.get
    model = args.get("model", environment("FERRUM_MODEL"))
    binary = args.get("binary", environment("FERRUM_BINARY", "ferrum"))
    flags = list(args.get("flags", environment("FERRUM_FLAGS", "").split()))
    least = int(args.get("min_replicas", environment("FERRUM_MIN_REPLICAS", "1")))
    most = int(args.get("max_replicas", environment("FERRUM_MAX_REPLICAS", str(max(least, 2)))))
    # Sequences that a replica decodes together, and those that may wait for it.
    target = int(args.get("target_requests", 16))
    replicas = Replica.options(
        max_ongoing_requests=int(args.get("max_requests", 4 * target)),
        autoscaling_config={
            "min_replicas": least,
            "initial_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": target,
            "upscale_delay_s": float(args.get("upscale_delay_s", 10)),
            "downscale_delay_s": float(args.get("downscale_delay_s", 300)),
        },
        ray_actor_options={
            # Two replicas and their ingress fit on two cores.
            "num_cpus": float(args.get("cpus", environment("FERRUM_CPUS", "0.9"))),
            "num_gpus": float(args.get("gpus", 0)),
        },
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=float(args.get("drain_seconds", 60)),
    )
    ingress = Ingress.options(
        num_replicas=int(args.get("ingresses", 1)),
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": float(args.get("ingress_cpus", 0.1))},
    )
    return ingress.bind(replicas.bind(binary, model, flags))


app = build({})
