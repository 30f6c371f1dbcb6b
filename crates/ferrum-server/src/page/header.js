// What stands above the conversation: the models that there are, and how full the context is.
import { Failure, listModels } from "./api.js";
import { byId, make } from "./dom.js";
import { changeSettings, settings } from "./settings.js";
import { suggestionsFor } from "./suggestions.js";
import { pathOf } from "./tree.js";

const select = byId("model");
let models = [];

select.addEventListener("change", () => {
  changeSettings({ model: select.value });
  greet();
});

/** What is said of a model whose answers take longer. */
const STATES = new Map([
  ["unloaded", "not loaded"],
  ["unloading", "not loaded"],
  ["loading", "loading…"],
  ["failed", "failed"],
]);

function labelOf({ id, status }) {
  const words = STATES.get(status?.value);
  return words ? `${id} (${words})` : id;
}

/** The server's entry of the model that answers; undefined while there is none. */
export function modelInUse() {
  return models.find(({ id }) => id === settings.model);
}

const listeners = new Set();

/** Calls `listener` each time the server has told its models. */
export function onModels(listener) {
  listeners.add(listener);
}

let suggest;

/** Lets the prompts of the empty page be sent by `send`. */
export function setUpSuggestions(send) {
  suggest = send;
  greet();
}

function greet() {
  const { model } = settings;
  const place = byId("suggestions");
  byId("welcome-model").textContent = model;
  if (!suggest || !model || place.dataset.model === model) return;
  place.dataset.model = model;
  const button = (prompt) => make("button", { type: "button", onclick: () => suggest(prompt) }, prompt);
  place.replaceChildren(...suggestionsFor(model).map((prompt) => make("li", {}, button(prompt))));
}

function drawModels() {
  const labels = models.map(labelOf);
  const drawn = [...select.options].map((option) => option.label);
  // A list that is open closes when it is drawn anew.
  if (labels.length === drawn.length && labels.every((label, i) => label === drawn[i])) return;
  select.replaceChildren(...models.map((model, i) => make("option", { value: model.id }, labels[i])));
}

/** Asks the server for its models. Gives what went wrong, or null. */
export async function loadModels() {
  try {
    models = await listModels();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    if (models.length === 0) select.replaceChildren(make("option", {}, "No model"));
    select.disabled = models.length === 0;
    return error;
  }
  drawModels();
  select.disabled = models.length === 0;
  const known = models.some(({ id }) => id === settings.model);
  if (!known && models.length > 0) changeSettings({ model: models[0].id });
  select.value = settings.model;
  greet();
  for (const listener of listeners) listener();
  return null;
}

/** Shows how many tokens of the context the conversation takes, as its last answer told. */
export function drawContext(conversation) {
  const place = byId("context");
  const stats = pathOf(conversation).findLast((node) => node.stats?.exact)?.stats;
  const length = modelInUse()?.max_model_len;
  place.hidden = !stats || !length;
  if (place.hidden) return;
  const used = (stats.prompt ?? 0) + stats.tokens;
  const numbers = [used, length].map((n) => n.toLocaleString("en"));
  byId("context-words").textContent = numbers.join(" / ");
  const share = Math.min(used / length, 1);
  const meter = byId("context-meter");
  meter.setAttribute("aria-valuenow", share.toFixed(2));
  meter.classList.toggle("high", share > 0.9);
  meter.firstElementChild.style.width = `${100 * share}%`;
  place.title = `${numbers[0]} of ${numbers[1]} tokens of the context are taken`;
}
