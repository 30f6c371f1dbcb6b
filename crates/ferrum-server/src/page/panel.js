// The settings: each change holds at once, so there is nothing to save and nothing to cancel.
import { byId, make } from "./dom.js";
import { modelInUse, onModels } from "./header.js";
import { EXAMPLE_TOOLS, SAMPLING, changeSettings, defaultWords, readTools, samplingFault, settings } from "./settings.js";
import { keyStore } from "./storage.js";

/** Makes the panel work. `chat` has the open conversation: `system()`, `setSystem(text)`, `askForKey()`. */
export function setUpPanel(chat) {
  const dialog = byId("settings");
  closesOutside(dialog);
  const parts = [systemField(chat), samplingFields(), toolsField(), themeField(), keyField(dialog, chat)];
  return function open() {
    for (const fill of parts) fill();
    dialog.showModal();
  };
}

/** Lets a click beside a dialog close it, and its button with the cross. */
export function closesOutside(dialog) {
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  dialog.querySelector(".close")?.addEventListener("click", () => dialog.close());
}

function systemField(chat) {
  const area = byId("system");
  area.addEventListener("input", () => chat.setSystem(area.value));
  return () => (area.value = chat.system());
}

function samplingFields() {
  const place = byId("sampling");
  const inputs = SAMPLING.map((field) => {
    const { name, label, usual, min, max, step, hint } = field;
    const id = `sampling-${name}`;
    const input = make("input", { id, type: "number", min, max, step, inputmode: "decimal", "aria-describedby": `${id}-hint` });
    const words = make("small", { id: `${id}-hint` }, hint);
    const show = () => {
      // A number field gives an empty text for what is no number.
      const fault = input.validity.badInput ? `${label}: expected a number` : samplingFault(field, input.value);
      input.setAttribute("aria-invalid", String(fault !== ""));
      words.textContent = fault || hint;
      return fault;
    };
    input.addEventListener("input", () => {
      const { [name]: _, ...rest } = settings.sampling;
      const isSet = show() === "" && input.value !== "";
      changeSettings({ sampling: isSet ? { ...rest, [name]: Number(input.value) } : rest });
    });
    place.append(make("div", { class: "field" }, make("label", { for: id }, label, make("span", { class: "usual" }, ` (${usual})`)), input, words));
    return { name, input, show };
  });
  const showDefaults = () => {
    for (const { name, input } of inputs) input.placeholder = defaultWords(name, modelInUse());
  };
  // The panel can be open before the server has told its models.
  onModels(showDefaults);
  const fill = () => {
    showDefaults();
    for (const { name, input, show } of inputs) {
      input.value = settings.sampling[name] ?? "";
      show();
    }
  };
  byId("reset-sampling").addEventListener("click", () => {
    changeSettings({ sampling: {} });
    fill();
  });
  return fill;
}

function toolsField() {
  const area = byId("tools");
  const words = byId("tools-words");
  const show = () => {
    const { tools, fault } = readTools(area.value);
    area.setAttribute("aria-invalid", String(Boolean(fault)));
    const names = tools.map((tool) => tool.function.name).join(", ");
    words.textContent = fault ?? (names ? `The model may call ${names}. You say what they give.` : "OpenAI's form: a list of functions.");
  };
  const change = () => {
    show();
    changeSettings({ tools: area.value });
  };
  area.addEventListener("input", change);
  byId("example-tools").addEventListener("click", () => {
    area.value = EXAMPLE_TOOLS;
    change();
  });
  return () => {
    area.value = settings.tools;
    show();
  };
}

function themeField() {
  const radios = [...document.querySelectorAll("input[name=theme]")];
  for (const radio of radios) radio.addEventListener("change", () => changeSettings({ theme: radio.value }));
  return () => {
    for (const radio of radios) radio.checked = radio.value === (settings.theme || "system");
  };
}

function keyField(dialog, chat) {
  const words = byId("key-words");
  const forget = byId("forget-key");
  const show = () => {
    const there = keyStore.get() !== "";
    const kept = keyStore.isRemembered() ? "kept in this browser" : "kept until this tab is closed";
    words.textContent = there ? `There is one, ${kept}.` : "None. A server that wants one asks for it.";
    forget.hidden = !there;
  };
  forget.addEventListener("click", () => {
    keyStore.forget();
    show();
  });
  byId("change-key").addEventListener("click", () => {
    dialog.close();
    chat.askForKey("");
  });
  return show;
}
