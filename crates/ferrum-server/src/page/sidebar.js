// The list of conversations.
import { byId, iconButton, make } from "./dom.js";
import { chatStore } from "./storage.js";

const DAY = 24 * 60 * 60 * 1000;

/** Under which heading a conversation stands. */
export function ageName(updated, now) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  if (updated >= midnight) return "Today";
  if (updated >= midnight - DAY) return "Yesterday";
  return updated >= midnight - 7 * DAY ? "Last seven days" : "Older";
}

/** Draws the list. `actions`: `open(id)`, `rename(id, title)`, `remove(id)`; `isBusy(id)`: it is being answered. */
export function drawChats(current, actions, isBusy) {
  const place = byId("chats");
  const groups = new Map();
  for (const entry of chatStore.list()) {
    const name = ageName(entry.updated, Date.now());
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(entryView(entry, entry.id === current, actions, isBusy(entry.id)));
  }
  const parts = [...groups].flatMap(([name, entries]) => [make("h2", {}, name), make("ul", {}, ...entries)]);
  place.replaceChildren(...(parts.length ? parts : [make("p", { class: "empty" }, "Conversations are kept in this browser only.")]));
}

function entryView({ id, title }, isCurrent, actions, busy) {
  const name = title || "New chat";
  const open = make(
    "button",
    { type: "button", class: "chat-name", "aria-current": isCurrent ? "page" : undefined, onclick: () => actions.open(id) },
    make("span", { dir: "auto" }, name),
    busy ? make("i", { class: "busy", role: "img", "aria-label": "being answered" }) : undefined,
  );
  const rename = () => {
    const input = make("input", { class: "chat-rename", "aria-label": "Name of the conversation", maxlength: "120" });
    let done = false;
    const finish = (keep) => {
      if (done) return;
      done = true;
      actions.rename(id, keep ? input.value.trim() || name : name);
    };
    input.value = name;
    input.addEventListener("blur", () => finish(true));
    input.addEventListener("keydown", (event) => {
      if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
      event.stopPropagation();
      event.preventDefault();
      finish(event.key === "Enter");
    });
    entry.replaceChildren(input);
    input.select();
  };
  const entry = make(
    "li",
    { class: isCurrent ? "current" : undefined },
    open,
    iconButton("edit", `Rename: ${name}`, rename),
    iconButton("bin", `Delete: ${name}`, () => actions.remove(id)),
  );
  return entry;
}
