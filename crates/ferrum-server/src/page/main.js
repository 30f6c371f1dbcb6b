// The page as a whole: which conversation is open, and what each button and key does.
import { setUpAttachments } from "./attachments.js";
import { announce, byId, freshId, growWithText, sendOnEnter, toast } from "./dom.js";
import { setUpExchange } from "./exchange.js";
import { drawContext, loadModels, setUpSuggestions } from "./header.js";
import { setUpKeyDialog } from "./key.js";
import { setUpPalette } from "./palette.js";
import { closesOutside, setUpPanel } from "./panel.js";
import { isRunning, run, stopRun } from "./runs.js";
import { changeSettings, onSettings, settings, settingsSummary } from "./settings.js";
import { drawChats } from "./sidebar.js";
import { chatStore } from "./storage.js";
import { Thread } from "./thread.js";
import { addNode, newConversation, nodeOf, openCalls, showNode, showVersion, titleOf } from "./tree.js";

/** How often an answer that comes is saved, in milliseconds. */
const SAVE_EVERY = 3000;

/** How often a model is looked at that says nothing yet, in milliseconds: it may have to be loaded. */
const LOOK_EVERY = 2000;

const entry = byId("entry");
const send = byId("send");
const summary = byId("summary");
const body = document.body;
const narrow = matchMedia("(max-width: 52rem)");

// Conversations of this visit: an answer may come in one that is not open.
const visited = new Map();
let current = newConversation(freshId(), settings.system);

// ---- Conversations

function openChat(id) {
  current = visited.get(id) ?? chatStore.load(id) ?? newConversation(freshId(), settings.system);
  visited.set(current.id, current);
  if (narrow.matches) setSidebar(false);
  draw();
  if (!narrow.matches) entry.focus();
}

/** Opens a conversation such that the browser's way back leads to the one before. */
function goTo(id) {
  history.pushState(null, "", id === "" ? location.pathname : `#${id}`);
  openChat(id);
}

function renameChat(id, title) {
  const conversation = visited.get(id) ?? chatStore.load(id);
  if (!conversation) return;
  conversation.title = title;
  save(conversation);
  draw();
  byId("chats").querySelector(".current .chat-name")?.focus();
}

function removeChat(id) {
  const conversation = visited.get(id) ?? chatStore.load(id);
  if (!conversation) return;
  stopRun(conversation);
  chatStore.remove(id);
  visited.delete(id);
  if (current.id === id) goTo("");
  else drawSidebar();
  byId("new-chat").focus();
  const putBack = () => {
    visited.set(id, conversation);
    save(conversation);
    goTo(id);
  };
  toast("The conversation was deleted.", putBack, "Undo");
}

let hasWarned = false;

function save(conversation) {
  if (chatStore.save(conversation) || hasWarned) return;
  hasWarned = true;
  toast("This conversation cannot be kept: the browser's storage is full. Delete some others.");
}

// ---- Asking

/** Asks for the next message of a conversation, and draws and saves it while it comes. */
async function ask(conversation) {
  visited.set(conversation.id, conversation);
  save(conversation);
  let drawn;
  let saved = Date.now();
  const looking = setInterval(refreshModels, LOOK_EVERY);
  const changed = (node) => {
    if (node.content !== "" || node.reasoning) clearInterval(looking);
    if (Date.now() - saved > SAVE_EVERY) {
      saved = Date.now();
      save(conversation);
    }
    if (current !== conversation) return;
    if (drawn === node) return thread.refresh();
    drawn = node;
    draw();
    thread.scrollToEnd();
  };
  await run(conversation, changed);
  clearInterval(looking);
  refreshModels();
  // It may have been deleted while it was answered.
  if (visited.get(conversation.id) === conversation) save(conversation);
  if (current === conversation) draw();
  else drawSidebar();
  if (nodeOf(conversation, conversation.leaf)?.status === 401) askForKey();
}

function sendEntry() {
  if (!hasEntry() || isRunning(current)) return;
  const typed = entry.value;
  entry.value = "";
  fitEntry();
  sendText([typed, ...attachments.take()].filter((part) => part.trim() !== "").join("\n\n"), typed);
}

function hasEntry() {
  return entry.value.trim() !== "" || !attachments.isEmpty();
}

/** Says a text in the open conversation, which is named by `title` if it has no name. */
function sendText(text, title = text) {
  const waiting = nodeOf(current, current.leaf);
  if (waiting && openCalls(current, waiting).length > 0) {
    // The model waits for the results of its calls; what is said instead ends the waiting.
    for (const call of openCalls(current, waiting)) addResult(call, '{"error": "not called"}');
  }
  if (current.title === "") current.title = titleOf(title.trim() || text.replace(/^`+\w* ?/, ""));
  if (location.hash !== `#${current.id}`) history.pushState(null, "", `#${current.id}`);
  addNode(current, current.leaf, { id: freshId(), role: "user", content: text });
  ask(current);
}

function addResult(call, text) {
  addNode(current, current.leaf, { id: freshId(), role: "tool", callId: call.id, name: call.name, content: text });
}

const thread = new Thread({
  edit(node, text) {
    if (isRunning(current)) return;
    addNode(current, node.parent, { id: freshId(), role: "user", content: text });
    ask(current);
    entry.focus();
  },
  again(node) {
    if (isRunning(current)) return;
    current.leaf = node.parent;
    ask(current);
    entry.focus();
  },
  version(node, step) {
    if (isRunning(current)) return;
    const siblings = current.nodes.filter((other) => other.parent === node.parent);
    const shown = siblings[siblings.indexOf(node) + step];
    showVersion(current, node, step);
    save(current);
    draw();
    thread.focusButton(shown?.id, step < 0 ? "Previous version" : "Next version");
  },
  answerCalls(node, results) {
    if (isRunning(current)) return;
    for (const { call, text } of results) addResult(call, text.trim() || "{}");
    ask(current);
    entry.focus();
  },
  newChat: () => newChat(),
});

// ---- Drawing

function draw() {
  thread.show(current);
  drawContext(current);
  drawSidebar();
  drawSend();
  document.title = current.title ? `${current.title} · Ferrum` : "Ferrum";
}

function drawSidebar() {
  const isBusy = (id) => visited.has(id) && isRunning(visited.get(id));
  drawChats(current.id, { open: goTo, rename: renameChat, remove: removeChat }, isBusy);
}

function drawSend() {
  const running = isRunning(current);
  body.classList.toggle("answering", running);
  send.setAttribute("aria-label", running ? "Stop" : "Send");
  send.title = running ? "Stop (Esc)" : "Send (Enter)";
  // While an answer comes, the button is for stopping it.
  send.disabled = !running && !hasEntry();
  const parts = [current.system.trim() === "" ? "" : "system prompt", settingsSummary()];
  summary.textContent = parts.filter((part) => part !== "").join(" · ");
  summary.setAttribute("aria-label", `Settings: ${summary.textContent}`);
  summary.hidden = summary.textContent === "";
}

function setSidebar(open) {
  body.classList.toggle("sidebar-open", open);
  byId("sidebar").inert = !open;
  byId("toggle-sidebar").setAttribute("aria-expanded", String(open));
}

// ---- Buttons and keys

const fitEntry = growWithText(entry);
const attachments = setUpAttachments(() => drawSend());
setUpSuggestions((prompt) => sendText(prompt));
entry.addEventListener("input", drawSend);
sendOnEnter(entry, sendEntry);
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isRunning(current)) stopRun(current);
  else sendEntry();
});
entry.addEventListener("keydown", (event) => {
  if (event.key !== "ArrowUp" || entry.value !== "" || isRunning(current)) return;
  event.preventDefault();
  thread.editLast();
});

const closeSidebar = () => {
  setSidebar(false);
  byId("toggle-sidebar").focus();
};
byId("toggle-sidebar").addEventListener("click", () => {
  setSidebar(!body.classList.contains("sidebar-open"));
  if (narrow.matches) byId("new-chat").focus();
});
byId("scrim").addEventListener("click", closeSidebar);
narrow.addEventListener("change", () => setSidebar(!narrow.matches));

const newChat = () => {
  goTo("");
  entry.focus();
};
byId("new-chat").addEventListener("click", newChat);

async function refreshModels() {
  const failure = await loadModels();
  drawContext(current);
  return failure;
}

const askForKey = setUpKeyDialog(refreshModels);
const openSettings = setUpPanel({
  askForKey,
  system: () => current.system,
  setSystem(text) {
    current.system = text;
    // The next conversation begins as this one did.
    changeSettings({ system: text });
    if (current.nodes.length > 0) save(current);
  },
});
for (const button of [byId("open-settings"), summary]) button.addEventListener("click", openSettings);

const openSearch = setUpPalette((id, node) => {
  goTo(id);
  if (!node) return;
  showNode(current, node);
  draw();
  thread.reveal(node);
});
byId("open-search").addEventListener("click", openSearch);

setUpExchange({
  current: () => current,
  imported() {
    // What is here now may be what is open.
    for (const [other, conversation] of visited) if (!isRunning(conversation)) visited.delete(other);
    visited.set(current.id, current);
    drawSidebar();
  },
});

const help = byId("help");
closesOutside(help);
const openHelp = () => help.showModal();
byId("open-help").addEventListener("click", openHelp);

const SHORTCUTS = {
  "O": newChat,
  "K": openSearch,
  ",": openSettings,
  "/": openHelp,
};

document.addEventListener("keydown", (event) => {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  const command = event.ctrlKey || event.metaKey;
  const key = event.key.length === 1 ? event.key.toUpperCase() : event.key;
  const action = command && !event.altKey && (key !== "O" || event.shiftKey) ? SHORTCUTS[key] : undefined;
  if (action) {
    event.preventDefault();
    action();
  } else if (key === "Escape" && narrow.matches && body.classList.contains("sidebar-open")) {
    closeSidebar();
  } else if (key === "Escape" && isRunning(current)) {
    stopRun(current);
    entry.focus();
  } else if (event.target === body && event.key.length === 1 && !command && !event.altKey) {
    // Whoever types with the focus nowhere means the message.
    entry.focus();
  }
});

// ---- The world outside

addEventListener("popstate", () => openChat(location.hash.slice(1)));
addEventListener("pagehide", () => {
  for (const conversation of visited.values()) if (isRunning(conversation)) save(conversation);
});
addEventListener("storage", (event) => {
  if (!chatStore.isList(event)) return;
  // What another tab wrote is newer, unless this one is writing.
  const { id } = current;
  for (const [other, conversation] of visited) if (!isRunning(conversation)) visited.delete(other);
  const stored = isRunning(current) ? null : chatStore.load(id);
  if (stored) current = stored;
  visited.set(current.id, current);
  draw();
});
onSettings(drawSend);

setSidebar(!narrow.matches);
openChat(location.hash.slice(1));
refreshModels().then((failure) => {
  if (failure?.status === 401) askForKey();
  else if (failure) toast(failure.message, refreshModels, "Try again");
  if (!failure) announce(`Model ${settings.model}`);
});
