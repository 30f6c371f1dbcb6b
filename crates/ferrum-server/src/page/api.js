// The server's routes as this page uses them.
import { EventReader } from "./events.js";
import { keyStore } from "./storage.js";

/**
 * Why there is no answer, in words for people. `status` is 0 when the server was not reached; `code` is the
 * server's word for what happened, if it has one.
 */
export class Failure extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = keyStore.get();
  if (key !== "") headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // A key with characters that no header has is no key of this server.
    if (error instanceof TypeError && !/^[\x20-\x7e]*$/.test(key)) throw new Failure("this is no API key", 401);
    throw new Failure("The server cannot be reached. Is it running?");
  }
  if (response.ok) return response;
  throw await failureOf(response);
}

async function failureOf(response) {
  const { status } = response;
  const { message, code } = await response.json().then((body) => body?.error ?? {}, () => ({}));
  const wait = response.headers.get("Retry-After");
  const reason = message ? String(message) : `The server answered with status ${status}.`;
  return new Failure(status === 429 && wait ? `${reason}. Try again in ${wait} s.` : reason, status, String(code ?? ""));
}

/** The models that there are: `[{id, max_model_len, status: {value}, ferrum: {defaults}}]`. */
export async function listModels() {
  const { data } = await (await ask("/v1/models")).json();
  return Array.isArray(data) ? data.filter((model) => typeof model?.id === "string") : [];
}

/** The chunks of a streamed answer. Ends by returning, or with a `Failure` when it breaks off. */
export async function* streamChat(request, signal) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const events = new EventReader();
  const body = response.body.getReader();
  const lost = () => new Failure("The connection broke before the answer was complete.");
  while (true) {
    const { done, value } = await body.read().catch((error) => {
      throw error.name === "AbortError" ? error : lost();
    });
    if (done) throw lost();
    for (const data of events.push(value)) {
      if (data === "[DONE]") return;
      yield chunkOf(data);
    }
  }
}

function chunkOf(data) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new Failure("The server sent something that is not an answer.");
  }
  if (chunk?.error) throw new Failure(String(chunk.error.message ?? "The answer failed."), 500, String(chunk.error.code ?? ""));
  return chunk ?? {};
}
