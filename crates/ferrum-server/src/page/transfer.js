// Conversations as a file. What is read is hostile: nothing of it is taken that is not of the right form.
import { readConversation } from "./tree.js";

const FORMAT = "ferrum.conversations";
const VERSION = 1;
/** Bounds of a file; a browser's storage holds less. */
export const MAX_FILE_BYTES = 32 << 20;
const MOST_CHATS = 10_000;
const MOST_NODES = 10_000;
const ID = /^[\w-]{1,64}$/;

/** The text of a file with these conversations. */
export function exportText(conversations, now) {
  const exported = new Date(now).toISOString();
  return `${JSON.stringify({ format: FORMAT, version: VERSION, exported, conversations }, null, 1)}\n`;
}

/** What such a file has: `{conversations, refused}`, the second a count. Throws what is wrong with it as a whole. */
export function readExport(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("The file has no conversations of this page.");
  }
  if (file.version !== VERSION) throw new Error(`The file has version ${String(file.version).slice(0, 20)}, this page reads ${VERSION}.`);
  if (file.conversations.length > MOST_CHATS) throw new Error(`The file has more than ${MOST_CHATS} conversations.`);
  const conversations = file.conversations.map(readOne).filter((found) => found !== null);
  return { conversations, refused: file.conversations.length - conversations.length };
}

function readOne(value) {
  if (!Array.isArray(value?.nodes) || value.nodes.length > MOST_NODES || !ID.test(value.id)) return null;
  const found = readConversation(value);
  if (!found || found.nodes.length === 0) return null;
  // A date that never was would stand at the top for ever.
  return { ...found, title: found.title.slice(0, 200), updated: Math.max(0, Math.min(found.updated, Date.now())) };
}

/**
 * Keeps what was read: `{added, known, full}`. One that is there already is left alone, and another under its id
 * gets a new one: an import overwrites nothing.
 */
export function keepImported(conversations, store, freshId) {
  let added = 0;
  let known = 0;
  for (const conversation of conversations) {
    const present = store.load(conversation.id);
    if (present && JSON.stringify(present.nodes) === JSON.stringify(conversation.nodes)) {
      known += 1;
      continue;
    }
    if (!store.save(present ? { ...conversation, id: freshId() } : conversation)) return { added, known, full: true };
    added += 1;
  }
  return { added, known, full: false };
}
