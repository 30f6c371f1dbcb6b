// Answers in the making: any number of conversations may have one.
import { streamChat } from "./api.js";
import { Answer } from "./answer.js";
import { announce, freshId } from "./dom.js";
import { requestFields } from "./settings.js";
import { addNode, pathOf, toMessages } from "./tree.js";

const running = new Map();

export function isRunning(conversation) {
  return running.has(conversation.id);
}

export function stopRun(conversation) {
  running.get(conversation.id)?.abort();
}

/** Asks for the next message of a conversation. `changed` hears of each change of the answer. */
export async function run(conversation, changed) {
  if (isRunning(conversation)) return;
  const request = { ...requestFields(), messages: toMessages(conversation) };
  const node = addNode(conversation, conversation.leaf, { id: freshId(), role: "assistant" });
  const control = new AbortController();
  running.set(conversation.id, control);
  announce("Waiting for the answer");
  changed(node);
  const answer = new Answer(node, performance.now());
  try {
    for await (const chunk of streamChat(request, control.signal)) {
      answer.add(chunk, performance.now());
      changed(node);
    }
    if (!answer.complete) node.error = "The answer ended before it was complete.";
  } catch (error) {
    if (control.signal.aborted) node.finish = "stopped";
    else fail(node, error);
  }
  nameCalls(conversation, node);
  running.delete(conversation.id);
  conversation.updated = Date.now();
  announce(ending(node));
  changed(node);
}

function fail(node, error) {
  node.error = error.message;
  node.status = error.status;
  if (error.code) node.code = error.code;
  // A mistake of this page is worth more than a sentence.
  if (error.status === undefined) console.error(error);
}

/** A result names its call, so each call needs an id that no other call of the conversation has. */
function nameCalls(conversation, node) {
  const others = pathOf(conversation).filter((other) => other !== node);
  const taken = new Set(others.flatMap((other) => (other.calls ?? []).map((call) => call.id)));
  for (const call of node.calls ?? []) {
    if (call.id === "" || taken.has(call.id)) call.id = `call_${freshId()}`;
    taken.add(call.id);
  }
}

/** What is said of an answer that has ended: its words, unless they are many. */
function ending(node) {
  if (node.error) return `The answer failed: ${node.error}`;
  if (node.finish === "stopped") return "Stopped";
  if (node.calls?.length) return `The model calls ${node.calls.map((call) => call.name).join(", ")}`;
  return node.content.length > 400 ? "The answer is complete" : `Answer: ${node.content}`;
}
