// An answer in the making: what the chunks of a stream add to a message.

/** Gathers the chunks of one answer into `node`. Times are in milliseconds, as `now` has them. */
export class Answer {
  #node;
  #started;
  #firstToken;
  #lastToken;
  #thoughtFrom;
  #pieces = 0;
  /** Whether the stream said that the answer is complete. */
  complete = false;

  constructor(node, now) {
    this.#node = node;
    this.#started = now;
  }

  add(chunk, now) {
    const node = this.#node;
    if (chunk.model) node.model = String(chunk.model);
    if (chunk.usage) this.#count(chunk.usage, now);
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) {
      node.finish = String(choice.finish_reason);
      this.complete = true;
    }
    const delta = choice.delta ?? {};
    const { content, reasoning_content: reasoning } = delta;
    const calls = delta.tool_calls ?? [];
    if (!content && !reasoning && calls.length === 0) return;
    this.#time(now);
    if (reasoning) {
      this.#thoughtFrom ??= now;
      node.reasoning = (node.reasoning ?? "") + reasoning;
      node.thought = (now - this.#thoughtFrom) / 1000;
    }
    if (content) node.content += content;
    for (const call of calls) this.#addCall(call);
  }

  #addCall(delta) {
    const calls = (this.#node.calls ??= []);
    const index = delta.index ?? 0;
    // Calls come one after the other.
    if (!(index >= 0 && index <= calls.length)) return;
    const call = (calls[index] ??= { id: "", name: "", arguments: "" });
    if (delta.id) call.id = String(delta.id);
    if (delta.function?.name) call.name += delta.function.name;
    if (delta.function?.arguments) call.arguments += delta.function.arguments;
  }

  #time(now) {
    this.#pieces += 1;
    this.#firstToken ??= now;
    this.#lastToken = now;
    const stats = (this.#node.stats ??= {});
    stats.first = (this.#firstToken - this.#started) / 1000;
    // Until the server says how many tokens it were, pieces are counted.
    if (!stats.exact) stats.tokens = this.#pieces;
    this.#rate(stats);
  }

  #count(usage, now) {
    // Tokens may come without a text.
    this.#firstToken ??= now;
    this.#lastToken ??= now;
    const stats = (this.#node.stats ??= {});
    stats.exact = true;
    stats.tokens = usage.completion_tokens;
    stats.prompt = usage.prompt_tokens;
    stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    this.#rate(stats);
  }

  /**
   * Tokens a second, from the first to the last: the prompt's time is not in it. Of a few tokens, or of all at
   * once, that says nothing; then it is from the request on.
   */
  #rate(stats) {
    const seconds = (this.#lastToken - this.#firstToken) / 1000;
    const enough = stats.tokens > 2 && seconds >= 0.02;
    const whole = (this.#lastToken - this.#started) / 1000;
    stats.whole = !enough;
    stats.rate = enough ? (stats.tokens - 1) / seconds : stats.tokens / Math.max(whole, 0.001);
  }
}

/** The figures of an answer in words. */
export function statWords(stats) {
  if (!stats?.tokens) return "";
  const about = stats.exact ? "" : "≈ ";
  const words = [`${about}${stats.tokens.toLocaleString("en")} token${stats.tokens === 1 ? "" : "s"}`];
  if (stats.rate) words.push(`${stats.rate >= 100 ? Math.round(stats.rate) : stats.rate.toFixed(1)} tokens/s`);
  if (stats.first !== undefined) words.push(`first after ${stats.first.toFixed(2)} s`);
  return words.join(" · ");
}
