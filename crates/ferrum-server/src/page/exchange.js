// Taking conversations out of this browser as a file, and bringing them in.
import { byId, freshId, make } from "./dom.js";
import { chatStore } from "./storage.js";
import { MAX_FILE_BYTES, exportText, keepImported, readExport } from "./transfer.js";

const ABOUT = "They are kept in this browser only. A file keeps them elsewhere, or brings them here.";

/** Makes the buttons of the settings work. `chat` has `current()`, and hears by `imported()` that there are more. */
export function setUpExchange(chat) {
  const chooser = byId("import-file");
  const say = (words) => (byId("exchange-words").textContent = words);
  say(ABOUT);
  byId("settings").addEventListener("close", () => say(ABOUT));
  byId("export-all").addEventListener("click", () => {
    const all = chatStore.list().map(({ id }) => chatStore.load(id));
    say(save(all.filter((found) => found !== null), "ferrum-conversations"));
  });
  byId("export-one").addEventListener("click", () => {
    const { title } = chat.current();
    const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
    say(save(chat.current().nodes.length > 0 ? [chat.current()] : [], name || "ferrum-conversation"));
  });
  byId("import").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", async () => {
    const [file] = chooser.files;
    if (!file) return;
    say(await bringIn(file));
    // The same file can be chosen again.
    chooser.value = "";
    chat.imported();
  });
}

/** Hands a file to the person; gives what came of it, in words. */
function save(conversations, name) {
  if (conversations.length === 0) return "There is nothing to export yet.";
  const now = Date.now();
  const file = new Blob([exportText(conversations, now)], { type: "application/json" });
  const href = URL.createObjectURL(file);
  const day = new Date(now).toISOString().slice(0, 10);
  const download = `${name}-${day}.json`;
  make("a", { href, download }).click();
  // The browser reads it after this.
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
  return `Saved as ${download}.`;
}

/** What came of a file, in words. */
async function bringIn(file) {
  if (file.size > MAX_FILE_BYTES) return "The file is too large to be one of this page.";
  let found;
  try {
    found = readExport(await file.text());
  } catch (error) {
    return `Nothing was imported. ${error.message}`;
  }
  const { added, known, full } = keepImported(found.conversations, chatStore, freshId);
  const words = [`${added} ${added === 1 ? "conversation was" : "conversations were"} imported.`];
  if (known > 0) words.push(`${known} ${known === 1 ? "was" : "were"} here already.`);
  if (found.refused > 0) words.push(`${found.refused} could not be read.`);
  if (full) words.push("The browser's storage is full: the rest was left out.");
  return words.join(" ");
}
