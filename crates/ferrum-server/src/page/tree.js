// A conversation is a tree: an edited message or a second answer is a branch beside the first, and
// nothing that was said is lost. What is shown is the path from the root to `leaf`.
//
// conversation: { id, title, system, updated, leaf, nodes }
// node: { id, parent, role, content, reasoning?, thought?, calls?, callId?, name?, model?, stats?, finish?,
//         error?, status?, code? }

export function newConversation(id, system = "") {
  return { id, title: "", system, updated: Date.now(), leaf: null, nodes: [] };
}

export function nodeOf(conversation, id) {
  return conversation.nodes.find((node) => node.id === id);
}

/** Adds a message after `parent` (null: at the beginning) and makes it the end of what is shown. */
export function addNode(conversation, parent, node) {
  const added = { content: "", ...node, parent };
  conversation.nodes.push(added);
  conversation.leaf = added.id;
  conversation.updated = Date.now();
  return added;
}

/** The messages that are shown, in order. */
export function pathOf(conversation) {
  const byId = new Map(conversation.nodes.map((node) => [node.id, node]));
  const path = [];
  let node = byId.get(conversation.leaf);
  // What was stored may be broken: no more steps than there are messages.
  while (node && path.length <= conversation.nodes.length) {
    path.push(node);
    node = byId.get(node.parent);
  }
  return path.reverse();
}

/** Messages that stand in one place: a message, its edited forms, or the answers to one message. */
export function versionsOf(conversation, node) {
  return conversation.nodes.filter((other) => other.parent === node.parent);
}

/** Shows another version of a message, with what came after it last. */
export function showVersion(conversation, node, step) {
  const versions = versionsOf(conversation, node);
  let shown = versions[versions.indexOf(node) + step];
  for (let next = shown; next; next = conversation.nodes.findLast((other) => other.parent === next.id)) {
    shown = next;
  }
  if (shown) conversation.leaf = shown.id;
}

/** Shows the message of this id, on whichever branch it is, with what came after it last. */
export function showNode(conversation, id) {
  const node = nodeOf(conversation, id);
  if (node && !pathOf(conversation).includes(node)) showVersion(conversation, node, 0);
}

/** Calls of an answer that wait for their results. */
export function openCalls(conversation, node) {
  const ends = conversation.leaf === node.id && node.role === "assistant";
  return ends && !node.error && node.finish !== "stopped" ? (node.calls ?? []) : [];
}

/** What is shown of a conversation, as the API takes it. */
export function toMessages(conversation) {
  const messages = [];
  const system = conversation.system.trim();
  if (system !== "") messages.push({ role: "system", content: system });
  for (const node of pathOf(conversation)) {
    const { role, content } = node;
    if (role === "tool") {
      messages.push({ role, content, tool_call_id: node.callId });
    } else if (role === "assistant") {
      const calls = node.calls ?? [];
      // An answer that failed before it said anything is not part of the conversation.
      if (content === "" && calls.length === 0) continue;
      const toApi = ({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      });
      const more = calls.length > 0 ? { tool_calls: calls.map(toApi) } : {};
      messages.push({ role, content, ...more });
    } else {
      messages.push({ role, content });
    }
  }
  return messages;
}

/** A title of the first words. */
export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

/** What was stored, if it has the form of a conversation. Other programs may have used this origin, and files hold anything. */
export function readConversation(value) {
  if (!value || !isText(value.id) || !Array.isArray(value.nodes)) return null;
  const byId = new Map();
  for (const found of value.nodes) {
    const node = readNode(found);
    if (!node || byId.has(node.id)) continue;
    // A message comes after the one that it answers, so there is no circle.
    if (!byId.has(node.parent)) node.parent = null;
    byId.set(node.id, node);
  }
  const nodes = [...byId.values()];
  return {
    id: value.id,
    title: isText(value.title) ? value.title : "",
    system: isText(value.system) ? value.system : "",
    updated: Number(value.updated) || 0,
    leaf: byId.has(value.leaf) ? value.leaf : (nodes.at(-1)?.id ?? null),
    nodes,
  };
}

const isText = (field) => typeof field === "string";

/** The fields that a message has, each of its type; all else is left behind. */
function readNode(value) {
  const fine = value && isText(value.id) && isText(value.content) && ["user", "assistant", "tool"].includes(value.role);
  if (!fine) return null;
  const node = { id: value.id, role: value.role, content: value.content, parent: value.parent ?? null };
  for (const name of ["reasoning", "callId", "name", "model", "finish", "error", "code"]) {
    if (isText(value[name])) node[name] = value[name];
  }
  for (const name of ["thought", "status"]) if (Number.isFinite(value[name])) node[name] = value[name];
  if (Array.isArray(value.calls)) node.calls = value.calls.map(readCall);
  if (Number.isFinite(value.stats?.tokens)) node.stats = readStats(value.stats);
  return node;
}

function readCall(found) {
  return { id: String(found?.id ?? ""), name: String(found?.name ?? ""), arguments: String(found?.arguments ?? "") };
}

function readStats(found) {
  const stats = { exact: found.exact === true, whole: found.whole === true };
  for (const name of ["first", "tokens", "rate", "prompt", "cached"]) {
    if (Number.isFinite(found[name]) && found[name] >= 0) stats[name] = found[name];
  }
  return stats;
}
