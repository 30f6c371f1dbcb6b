// The messages of the conversation that is open, and where the reader is in them.
import { byId } from "./dom.js";
import { messageView } from "./message.js";
import { isRunning } from "./runs.js";
import { openCalls, pathOf, versionsOf } from "./tree.js";

/** How near to its end a reader must be to be taken along as it grows, in pixels. */
const NEAR = 60;

export class Thread {
  #list = byId("messages");
  #scroller = byId("scroller");
  #toEnd = byId("to-end");
  #welcome = byId("welcome");
  #actions;
  #conversation;
  #views = [];
  #follows = true;
  #frame;

  constructor(actions) {
    this.#actions = actions;
    this.#scroller.addEventListener("scroll", () => this.#noteScroll());
    this.#toEnd.addEventListener("click", () => this.scrollToEnd());
    // The box also moves when the keyboard of a phone comes up or the entry grows.
    new ResizeObserver(() => this.#keepUp()).observe(this.#scroller);
  }

  /** Draws the path that is shown; what was there and still is, stays as it is. */
  show(conversation) {
    const path = pathOf(conversation);
    const same = conversation === this.#conversation;
    let kept = 0;
    while (same && kept < path.length && this.#views[kept]?.node === path[kept]) kept += 1;
    for (const { view } of this.#views.splice(kept)) view.element.remove();
    for (const node of path.slice(kept)) {
      const view = messageView(node, this.#actions);
      this.#views.push({ node, view });
      this.#list.append(view.element);
    }
    this.#conversation = conversation;
    this.#welcome.hidden = path.length > 0;
    if (!same) this.#follows = true;
    this.#draw();
  }

  /** Draws the last message again, at most once a frame. */
  refresh() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = undefined;
      this.#draw(this.#views.length - 1);
    });
  }

  scrollToEnd() {
    this.#follows = true;
    this.#keepUp();
  }

  /** Focuses a button of a message's bar, as after a version was changed by it. */
  focusButton(id, label) {
    const shown = this.#views.find(({ node }) => node.id === id);
    const buttons = shown?.view.element.querySelectorAll(".bar button:not(:disabled)") ?? [];
    const named = [...buttons].find((button) => button.getAttribute("aria-label") === label);
    (named ?? buttons[0])?.focus();
  }

  /** Brings a message into view, and marks it for a moment. */
  reveal(id) {
    const element = this.#views.find(({ node }) => node.id === id)?.view.element;
    if (!element) return;
    this.#follows = false;
    element.scrollIntoView({ block: "center" });
    element.classList.add("found");
    setTimeout(() => element.classList.remove("found"), 2000);
  }

  /** Opens the last message of the user for a change. */
  editLast() {
    this.#views.findLast(({ node }) => node.role === "user")?.view.startEdit();
  }

  #draw(from = 0) {
    const conversation = this.#conversation;
    const running = isRunning(conversation);
    this.#views.slice(Math.max(from, 0)).forEach(({ node, view }) => {
      const versions = versionsOf(conversation, node);
      view.update({
        running: running && (node.id === conversation.leaf || node.role === "user"),
        versions: versions.length,
        version: versions.indexOf(node),
        openCalls: openCalls(conversation, node),
      });
    });
    this.#keepUp();
  }

  #keepUp() {
    if (this.#follows) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#noteScroll();
  }

  #noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    this.#follows = scrollHeight - scrollTop - clientHeight < NEAR;
    this.#toEnd.hidden = this.#follows;
  }
}
