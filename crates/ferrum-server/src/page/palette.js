// The search in conversations, by Ctrl+K: a box to type into, and what fits.
import { byId, make } from "./dom.js";
import { closesOutside } from "./panel.js";
import { searchChats, searchable } from "./search.js";
import { chatStore } from "./storage.js";

/** Gives a function that opens the search. `open(id, node)` shows a conversation, and a message of it if one was found. */
export function setUpPalette(open) {
  const dialog = byId("search");
  const input = byId("query");
  const list = byId("found");
  const empty = byId("found-nothing");
  let chats = [];
  let results = [];
  let chosen = 0;
  closesOutside(dialog);

  const choose = (index) => {
    chosen = Math.max(0, Math.min(index, results.length - 1));
    [...list.children].forEach((entry, i) => entry.setAttribute("aria-selected", String(i === chosen)));
    const entry = list.children[chosen];
    if (entry) input.setAttribute("aria-activedescendant", entry.id);
    else input.removeAttribute("aria-activedescendant");
    entry?.scrollIntoView({ block: "nearest" });
  };
  const take = (index) => {
    const found = results[index];
    if (!found) return;
    dialog.close();
    open(found.id, found.node);
  };
  const draw = () => {
    results = searchChats(chats, input.value);
    list.replaceChildren(...results.map((found, i) => entryOf(found, i, () => take(i))));
    empty.hidden = results.length > 0;
    empty.textContent = chats.length === 0 ? "There are no conversations yet." : "Nothing fits.";
    choose(0);
  };
  input.addEventListener("input", draw);
  input.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    const steps = { ArrowDown: 1, ArrowUp: -1 };
    if (event.key in steps) choose(chosen + steps[event.key]);
    else if (event.key === "Enter") take(chosen);
    else return;
    event.preventDefault();
  });
  return function openSearch() {
    chats = chatStore.list().map(({ id }) => chatStore.load(id)).filter((chat) => chat !== null).map(searchable);
    input.value = "";
    draw();
    dialog.showModal();
    input.focus();
  };
}

function entryOf({ title, parts }, index, take) {
  const words = (parts ?? []).map(({ text, found }) => (found ? make("mark", {}, text) : text));
  return make(
    "li",
    { id: `found-${index}`, role: "option", onclick: take },
    make("span", { class: "found-title", dir: "auto" }, title || "New chat"),
    parts ? make("span", { class: "found-text", dir: "auto" }, ...words) : undefined,
  );
}
