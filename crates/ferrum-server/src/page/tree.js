// A conversation is a tree: an edited message or a second answer is a branch beside the first, and
// nothing that was said is lost. What is shown is the path from the root to `leaf`.
//
// conversation: { id, title, system, updated, leaf, nodes }
// node: { id, parent, role, content, reasoning?, thought?, calls?, callId?, model?, stats?, finish?, error? }

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

/** What was stored, if it has the form of a conversation. Other programs may have used this origin. */
export function readConversation(value) {
  const text = (field) => typeof field === "string";
  if (!value || !text(value.id) || !Array.isArray(value.nodes)) return null;
  const roles = ["user", "assistant", "tool"];
  const fine = (node) => node && text(node.id) && text(node.content) && roles.includes(node.role);
  const call = (found) => ({
    id: String(found?.id ?? ""),
    name: String(found?.name ?? ""),
    arguments: String(found?.arguments ?? ""),
  });
  const nodes = value.nodes.filter(fine).map((node) => ({
    ...node,
    calls: Array.isArray(node.calls) ? node.calls.map(call) : undefined,
    reasoning: text(node.reasoning) ? node.reasoning : undefined,
    error: text(node.error) ? node.error : undefined,
    stats: node.stats && Number.isFinite(node.stats.tokens) ? node.stats : undefined,
  }));
  return {
    id: value.id,
    title: text(value.title) ? value.title : "",
    system: text(value.system) ? value.system : "",
    updated: Number(value.updated) || 0,
    leaf: text(value.leaf) ? value.leaf : null,
    nodes,
  };
}
