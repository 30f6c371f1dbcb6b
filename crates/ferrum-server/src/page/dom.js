// Building the page without markup strings: text stays text, whatever it says.

/** An element: `make("button", { class: "quiet", onclick: copy }, "Copy")`. */
export function make(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null));
  return element;
}

/** One of the symbols at the top of `page.html`. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const use = document.createElementNS(space, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button that is only an icon to the eye. */
export function iconButton(name, label, onclick, props = {}) {
  const all = { type: "button", class: "icon-button", "aria-label": label, title: label, ...props };
  return make("button", { ...all, onclick }, icon(name));
}

export function byId(id) {
  return document.getElementById(id);
}

/** Tells those who do not see the page; the same words twice are said twice. */
export function announce(words) {
  const place = byId("announcer");
  place.textContent = "";
  setTimeout(() => (place.textContent = words), 50);
}

let toastTimer;

/** A short note at the bottom, with something to do about it if there is. */
export function toast(words, action, label) {
  const place = byId("toast");
  const close = () => {
    clearTimeout(toastTimer);
    place.replaceChildren();
  };
  const act = () => {
    close();
    action();
  };
  const parts = [make("span", {}, words)];
  if (action) parts.push(make("button", { type: "button", class: "link-button", onclick: act }, label));
  place.replaceChildren(...parts, iconButton("close", "Dismiss", close));
  clearTimeout(toastTimer);
  toastTimer = setTimeout(close, action ? 10_000 : 6_000);
}

/** Copies a text and says so on `button`. */
export async function copyText(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Over plain HTTP on another machine a browser has no clipboard API.
    copied = copyBySelection(text);
  }
  if (!copied) return toast("The browser does not let this page copy.");
  announce("Copied");
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"));
  setTimeout(() => button.replaceChildren(...before), 1200);
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const area = make("textarea", { class: "sr", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}

/** A name that nothing else has; `crypto.randomUUID` is missing over plain HTTP. */
export function freshId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_");
}

/** Whether Enter is for a new line: on a phone there is no Shift to press with it. */
export const touch = matchMedia("(pointer: coarse)");

/** Makes Enter send, but not while an input method is composing a word. */
export function sendOnEnter(area, send) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    if (touch.matches && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    send();
  });
}

/** Lets a text area be as high as its text, up to what the style allows. */
export function growWithText(area) {
  const fit = () => {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight}px`;
  };
  area.addEventListener("input", fit);
  return fit;
}
