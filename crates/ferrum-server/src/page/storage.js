// The browser's storage, where everything of this page lives: nothing is kept on the server.
import { readConversation } from "./tree.js";

/** Some browsers forbid storage in private windows; then it lasts as long as the page. */
function openStorage(kind) {
  try {
    const storage = window[kind];
    storage.getItem("ferrum");
    return storage;
  } catch {
    const kept = new Map();
    return {
      getItem: (name) => kept.get(name) ?? null,
      setItem: (name, value) => kept.set(name, value),
      removeItem: (name) => kept.delete(name),
    };
  }
}

const local = openStorage("localStorage");
const session = openStorage("sessionStorage");

function read(name) {
  try {
    return JSON.parse(local.getItem(name) ?? "null");
  } catch {
    return null;
  }
}

/** Whether there was room. */
function write(name, value) {
  try {
    local.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settingsStore = {
  read: () => read("ferrum.settings") ?? {},
  write: (settings) => write("ferrum.settings", settings),
};

/** The API key: for this tab, or for as long as the browser's data is kept. */
export const keyStore = {
  get: () => session.getItem("ferrum.key") ?? local.getItem("ferrum.key") ?? "",
  set(key, remember) {
    keyStore.forget();
    (remember ? local : session).setItem("ferrum.key", key);
  },
  forget() {
    session.removeItem("ferrum.key");
    local.removeItem("ferrum.key");
  },
  isRemembered: () => local.getItem("ferrum.key") !== null,
};

const INDEX = "ferrum.chats";
const nameOf = (id) => `ferrum.chat.${id}`;

/** Conversations: a list of `{id, title, updated}`, and each under a name of its own. */
export const chatStore = {
  list() {
    const found = read(INDEX);
    const entries = Array.isArray(found) ? found : [];
    const fine = entries.filter((entry) => typeof entry?.id === "string");
    const read1 = ({ id, title, updated }) => ({ id, title: String(title ?? ""), updated: Number(updated) || 0 });
    return fine.map(read1).sort((a, b) => b.updated - a.updated);
  },
  load: (id) => readConversation(read(nameOf(id))),
  /** Whether there was room. */
  save(conversation) {
    const { id, title, updated } = conversation;
    const others = chatStore.list().filter((entry) => entry.id !== id);
    return write(nameOf(id), conversation) && write(INDEX, [{ id, title, updated }, ...others]);
  },
  remove(id) {
    local.removeItem(nameOf(id));
    write(INDEX, chatStore.list().filter((entry) => entry.id !== id));
  },
  /** Whether another tab changed the list. */
  isList: (event) => event.key === INDEX || event.key === null,
};
