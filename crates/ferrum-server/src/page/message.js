// One message as the page shows it. A view is made once and then follows its node.
import { copyText, growWithText, icon, iconButton, make, sendOnEnter } from "./dom.js";
import { renderMarkdown, renderPlain } from "./render.js";
import { statWords } from "./answer.js";

/**
 * The view of a node: `{element, update}`. `actions` are what can be done:
 * `edit(node, text)`, `again(node)`, `version(node, step)`, `answerCalls(node, results)`, `newChat()`.
 * `update(state)` draws it as it is now: `{running, versions, version, openCalls}`.
 */
export function messageView(node, actions) {
  const views = { user: userView, assistant: assistantView, tool: toolView };
  return views[node.role](node, actions);
}

function frame(role, heading, ...parts) {
  return make("li", { class: `message ${role}` }, make("h2", { class: "sr" }, heading), ...parts);
}

/** Goes through the versions of a message: `‹ 2/3 ›`. */
function versionSwitch(node, actions) {
  const words = make("span", {});
  const back = iconButton("left", "Previous version", () => actions.version(node, -1));
  const on = iconButton("right", "Next version", () => actions.version(node, 1));
  const element = make("span", { class: "versions" }, back, words, on);
  const update = ({ versions, version }) => {
    element.hidden = versions < 2;
    words.textContent = `${version + 1}/${versions}`;
    back.disabled = version === 0;
    on.disabled = version === versions - 1;
  };
  return { element, update };
}

function userView(node, actions) {
  const text = make("div", { class: "bubble" });
  renderPlain(text, node.content);
  const versions = versionSwitch(node, actions);
  const copy = iconButton("copy", "Copy", () => copyText(node.content, copy));
  const edit = iconButton("edit", "Edit and send again", () => startEdit());
  const bar = make("div", { class: "bar" }, versions.element, copy, edit);
  const element = frame("user", "You", text, bar);

  const startEdit = () => {
    const close = () => {
      editor.replaceWith(text);
      bar.hidden = false;
      edit.focus();
    };
    const editor = editForm(node.content, close, (changed) => actions.edit(node, changed));
    text.replaceWith(editor);
    bar.hidden = true;
    editor.begin();
  };
  const update = (state) => {
    versions.update(state);
    edit.disabled = state.running;
  };
  return { element, update, startEdit };
}

function editForm(text, close, send) {
  const area = make("textarea", { "aria-label": "Edit the message", rows: "1", dir: "auto" });
  const fit = growWithText(area);
  const submit = () => area.value.trim() !== "" && send(area.value);
  const form = make(
    "form",
    { class: "edit" },
    area,
    make(
      "div",
      { class: "edit-buttons" },
      make("button", { type: "button", onclick: close }, "Cancel"),
      make("button", { type: "submit", class: "primary" }, "Send"),
    ),
  );
  area.value = text;
  sendOnEnter(area, submit);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    // Escape also stops an answer; here it means this form only.
    event.stopPropagation();
    close();
  });
  form.begin = () => {
    fit();
    area.focus();
    area.setSelectionRange(text.length, text.length);
  };
  return form;
}

function assistantView(node, actions) {
  const reasoning = reasoningView(node);
  const body = make("div", { class: "body" });
  const calls = callsView(node, actions);
  const waiting = make("div", { class: "waiting", "aria-hidden": "true" }, make("i"), make("i"), make("i"));
  const error = make("div", { class: "error", role: "alert" });
  const note = make("p", { class: "note" });
  const versions = versionSwitch(node, actions);
  const copy = iconButton("copy", "Copy", () => copyText(node.content, copy));
  const again = iconButton("again", "Answer again", () => actions.again(node));
  const stats = make("span", { class: "stats" });
  const bar = make("div", { class: "bar" }, versions.element, copy, again, stats);
  const element = frame("assistant", "Answer", reasoning.element, body, calls.element, waiting, error, note, bar);

  const update = (state) => {
    const { running } = state;
    const silent = node.content === "" && !node.calls?.length;
    reasoning.update(running && silent);
    renderMarkdown(body, node.content);
    calls.update(state);
    waiting.hidden = !running || !silent || Boolean(node.reasoning);
    element.classList.toggle("running", running);
    element.setAttribute("aria-busy", String(running));
    fillError(error, node, actions);
    note.textContent = noteOf(node);
    note.hidden = note.textContent === "" || running;
    versions.update(state);
    copy.hidden = running || node.content === "";
    // After a failure the message itself has a button for it, or none would help.
    again.hidden = running || Boolean(node.error);
    stats.textContent = statWords(node.stats);
    stats.title = statTitle(node);
  };
  return { element, update };
}

function noteOf(node) {
  if (node.finish === "stopped") return "Stopped.";
  if (node.finish === "length") return "The answer ends here: it reached the limit of tokens.";
  const silent = node.finish && node.content === "" && !node.calls?.length && !node.reasoning;
  return silent ? "The model said nothing." : "";
}

function statTitle({ stats, model }) {
  const words = [];
  if (stats?.whole) words.push("the rate counts from the request on: the tokens came too fast to time");
  if (stats?.prompt) {
    const cached = stats.cached ? `, ${stats.cached} of them from the cache` : "";
    words.push(`${stats.prompt} tokens of prompt${cached}`);
  }
  if (model) words.push(model);
  return words.join(" · ");
}

function fillError(place, node, actions) {
  place.hidden = !node.error;
  const words = node.error ?? "";
  // An alert that is filled twice is read twice.
  if (place.dataset.words === words) return;
  place.dataset.words = words;
  const button = (label, onclick) => make("button", { type: "button", class: "link-button", onclick }, label);
  const parts = isTooLong(node)
    ? [make("span", {}, `${sentence(words)} ${SHORTEN}`), button("New chat", actions.newChat)]
    : [make("span", {}, words), button("Try again", () => actions.again(node))];
  place.replaceChildren(...(words === "" ? [] : parts));
}

const SHORTEN = "Shorten a message (edit it and send it again), choose a model with a longer context, or begin a new chat.";

/** Whether the same would fail again: what was asked can never fit. */
function isTooLong({ code, status }) {
  return code === "context_length_exceeded" || status === 413;
}

function sentence(words) {
  const text = words.charAt(0).toUpperCase() + words.slice(1);
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

function reasoningView(node) {
  const label = make("span", {});
  const text = make("div", { class: "body thoughts" });
  const element = make("details", { class: "fold" }, make("summary", {}, icon("fold"), label), text);
  // Nobody reads what is folded, so it is drawn when it is opened.
  const draw = () => element.open && renderMarkdown(text, node.reasoning ?? "");
  element.addEventListener("toggle", draw);
  const update = (thinking) => {
    element.hidden = !node.reasoning;
    element.classList.toggle("thinking", thinking);
    const time = node.thought >= 1 ? `Thought for ${Math.round(node.thought)} s` : "Thoughts";
    label.textContent = thinking ? "Thinking…" : time;
    draw();
  };
  return { element, update };
}

/** JSON in lines, or the text as it is. */
function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function fold(kind, words, text) {
  const code = make("pre", { tabindex: "0" }, text);
  const element = make("details", { class: "fold" }, make("summary", {}, icon("fold"), icon(kind), words), code);
  return { element, code };
}

function callsView(node, actions) {
  const list = make("div", {});
  const form = make("form", { class: "results" });
  const element = make("div", { class: "calls" }, list, form);
  const shown = [];
  const update = ({ running, openCalls }) => {
    (node.calls ?? []).forEach((call, i) => {
      shown[i] ??= addCall(list, call);
      shown[i].code.textContent = running ? call.arguments : prettyJson(call.arguments);
    });
    element.hidden = shown.length === 0;
    const wanted = running ? [] : openCalls;
    if (form.childElementCount === 0 && wanted.length > 0) fillResults(form, node, wanted, actions);
    form.hidden = wanted.length === 0;
  };
  return { element, update };
}

function addCall(list, call) {
  const words = make("span", {}, "Calls ", make("code", {}, call.name));
  const view = fold("tool", words, "");
  view.element.open = true;
  list.append(view.element);
  return view;
}

/** Nothing runs tools here: a person says what they gave. */
function fillResults(form, node, calls, actions) {
  const areas = calls.map((call) => {
    const area = make("textarea", { rows: "2", dir: "auto", placeholder: '{"answer": 42}' });
    growWithText(area);
    form.append(make("label", {}, make("span", {}, "Result of ", make("code", {}, call.name)), area));
    return area;
  });
  form.append(make("button", { type: "submit", class: "primary" }, areas.length > 1 ? "Send results" : "Send result"));
  const submit = () => actions.answerCalls(node, areas.map((area, i) => ({ call: calls[i], text: area.value })));
  areas.forEach((area) => sendOnEnter(area, submit));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
}

function toolView(node) {
  const words = make("span", {}, "Result of ", make("code", {}, node.name ?? "a tool"));
  const view = fold("result", words, prettyJson(node.content));
  return { element: frame("tool", "Result of a tool", view.element), update: () => {} };
}
