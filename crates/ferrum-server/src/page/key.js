// The API key, for a server that wants one.
import { byId } from "./dom.js";
import { closesOutside } from "./panel.js";
import { keyStore } from "./storage.js";

/** Gives a function that asks for the key. `tryKey` gives what is wrong with the one that was entered, or null. */
export function setUpKeyDialog(tryKey) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  const fault = byId("key-fault");
  closesOutside(dialog);
  const say = (words) => {
    fault.textContent = words;
    fault.hidden = words === "";
  };
  byId("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (key === "") return say("Enter the key.");
    keyStore.set(key, byId("remember-key").checked);
    const failure = await tryKey();
    if (!failure) return dialog.close();
    if (failure.status === 401) keyStore.forget();
    say(failure.status === 401 ? "That key is not one of this server's." : failure.message);
    input.select();
  });
  // A key does not stay in a field.
  dialog.addEventListener("close", () => (input.value = ""));
  return function askForKey() {
    say("");
    byId("remember-key").checked = keyStore.isRemembered();
    if (!dialog.open) dialog.showModal();
    input.focus();
  };
}
