// Text files that go along with the next message: dropped, pasted, or chosen.
import { announce, byId, iconButton, make, toast } from "./dom.js";
import { MAX_FILES, fileBlock, fileSize, readTextFile } from "./files.js";

/**
 * Makes the message box take files. Gives `{isEmpty, take}`: `take` gives the files as Markdown, and forgets
 * them. `changed` hears of each that comes or goes.
 */
export function setUpAttachments(changed) {
  const place = byId("attachments");
  const chooser = byId("choose-files");
  let files = [];

  const draw = () => {
    const entries = files.map((file) => {
      const remove = () => {
        files = files.filter((other) => other !== file);
        draw();
        byId("entry").focus();
      };
      const size = make("small", {}, fileSize(file.size));
      return make("li", {}, make("span", { dir: "auto" }, file.name), size, iconButton("close", `Remove ${file.name}`, remove));
    });
    place.replaceChildren(...entries);
    place.hidden = files.length === 0;
    changed();
  };
  const add = async (list) => {
    const faults = [];
    const read = [];
    for (const file of list) {
      if (files.length + read.length >= MAX_FILES) {
        faults.push(`A message takes ${MAX_FILES} files at most.`);
        break;
      }
      await readTextFile(file).then((found) => read.push(found), (error) => faults.push(error.message));
    }
    files.push(...read);
    draw();
    if (read.length > 0) announce(`Added ${read.map(({ name }) => name).join(", ")}`);
    if (faults.length > 0) toast(faults.join(" "));
    byId("entry").focus();
  };

  byId("attach").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    add([...chooser.files]);
    // The same file can be chosen again.
    chooser.value = "";
  });
  takeDrops(add);
  takePastes(add);
  return {
    isEmpty: () => files.length === 0,
    take() {
      const blocks = files.map(fileBlock);
      files = [];
      draw();
      return blocks;
    },
  };
}

/** A file that is dropped anywhere is meant for the message: without this, the browser would leave the page for it. */
function takeDrops(add) {
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const show = (over) => document.body.classList.toggle("dropping", over);
  addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    const isFree = !document.querySelector("dialog[open]");
    event.dataTransfer.dropEffect = isFree ? "copy" : "none";
    show(isFree);
  });
  addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) show(false);
  });
  addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    show(false);
    // The list is empty once this event is over.
    if (!document.querySelector("dialog[open]")) add([...event.dataTransfer.files]);
  });
}

function takePastes(add) {
  byId("entry").addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    // A spreadsheet puts a picture beside its text; then the text is meant.
    if (files.length === 0 || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    add(files);
  });
}
