// What can be set, and how it reaches a request. One table makes the fields, their checks and the request.
import { settingsStore } from "./storage.js";

/** Sampling fields. One that is not set is not sent: the model's own recommendation holds. */
export const SAMPLING = [
  { name: "temperature", label: "Randomness", usual: "temperature", min: 0, max: 2, step: 0.05, hint: "0: always the likeliest token; higher: more surprising" },
  { name: "max_tokens", label: "Longest answer", usual: "max tokens", min: 1, max: 1_048_576, step: 1, hint: "a token is about ¾ of a word; the context is a limit, too" },
  { name: "top_p", label: "Likely share", usual: "top-p", min: 0.01, max: 1, step: 0.01, hint: "only the likeliest tokens that together make this share; 1: all" },
  { name: "top_k", label: "Likely number", usual: "top-k", min: 0, max: 100_000, step: 1, hint: "only this many of the likeliest tokens; 0: all" },
  { name: "min_p", label: "Least likelihood", usual: "min-p", min: 0, max: 1, step: 0.01, hint: "no token less likely than this, where the likeliest is 1" },
  { name: "seed", label: "Repeatability", usual: "seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, hint: "the same number gives the same answer" },
];

/** What holds where a field is empty, in words. `model` is an entry of the server's list of models. */
export function defaultWords(name, model) {
  if (name === "max_tokens") return "no limit";
  if (name === "seed") return "random";
  const value = model?.ferrum?.defaults?.[name];
  return Number.isFinite(value) ? String(value) : "the model's own";
}

/** What is wrong with a text as the value of a sampling field; empty if nothing is. */
export function samplingFault({ label, min, max, step }, text) {
  if (text.trim() === "") return "";
  const value = Number(text);
  if (!Number.isFinite(value) || value < min || value > max) return `${label}: expected ${min} to ${max}`;
  return step === 1 && !Number.isInteger(value) ? `${label}: expected a whole number` : "";
}

/** Reads tools as a person wrote them: `{tools}` or `{fault}`. */
export function readTools(text) {
  if (text.trim() === "") return { tools: [] };
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    return { tools: [], fault: `not JSON: ${error.message}` };
  }
  if (!Array.isArray(tools)) return { tools: [], fault: "expected a list: [ … ]" };
  const nameless = tools.findIndex((tool) => typeof tool?.function?.name !== "string");
  if (nameless >= 0) return { tools: [], fault: `tool ${nameless + 1} has no function with a name` };
  return { tools };
}

export const EXAMPLE_TOOLS = JSON.stringify(
  [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Get the weather in a city",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
  null,
  2,
);

function load() {
  const found = settingsStore.read();
  const text = (value) => (typeof value === "string" ? value : "");
  const sampling = {};
  for (const field of SAMPLING) {
    const value = found.sampling?.[field.name];
    if (Number.isFinite(value) && samplingFault(field, String(value)) === "") sampling[field.name] = value;
  }
  return { theme: text(found.theme), model: text(found.model), system: text(found.system), tools: text(found.tools), sampling };
}

/** The settings; change them by `changeSettings`. */
export const settings = load();

const listeners = new Set();

export function onSettings(listener) {
  listeners.add(listener);
}

export function changeSettings(changes) {
  Object.assign(settings, changes);
  settingsStore.write(settings);
  applyTheme();
  for (const listener of listeners) listener();
}

function applyTheme() {
  const root = document.documentElement;
  if (settings.theme === "light" || settings.theme === "dark") root.dataset.theme = settings.theme;
  else delete root.dataset.theme;
}

/** The fields of a request that come from the settings. */
export function requestFields() {
  const { tools } = readTools(settings.tools);
  return {
    ...(settings.model ? { model: settings.model } : {}),
    ...settings.sampling,
    ...(tools.length > 0 ? { tools } : {}),
  };
}

/** What is not as the model has it, in a few words. */
export function settingsSummary() {
  const words = SAMPLING.filter(({ name }) => name in settings.sampling);
  const parts = words.map(({ name, usual }) => `${usual} ${settings.sampling[name]}`);
  const { tools } = readTools(settings.tools);
  if (tools.length > 0) parts.push(tools.length === 1 ? "1 tool" : `${tools.length} tools`);
  return parts.join(" · ");
}
