// Text files as parts of a prompt: a fenced block each, under the file's name.

export const MAX_FILE = 256 * 1024;
export const MAX_FILES = 10;

const LANGUAGES = new Map(
  Object.entries({
    bat: "text", c: "c", cc: "cpp", cpp: "cpp", cs: "csharp", css: "css", csv: "csv", diff: "diff", go: "go", h: "c",
    hpp: "cpp", htm: "html", html: "html", ini: "ini", java: "java", js: "javascript", json: "json", jsx: "jsx",
    kt: "kotlin", lua: "lua", md: "markdown", mjs: "javascript", patch: "diff", php: "php", pl: "perl", py: "python",
    r: "r", rb: "ruby", rs: "rust", scss: "scss", sh: "bash", sql: "sql", swift: "swift", toml: "toml", ts: "typescript",
    tsx: "tsx", xml: "xml", yaml: "yaml", yml: "yaml",
  }),
);

/** What a file says. Throws why it cannot be a part of a prompt, for a person. */
export async function readTextFile(file) {
  const name = cleanName(file.name);
  if (file.size > MAX_FILE) throw new Error(`${name} is too large: ${fileSize(file.size)}, at most ${fileSize(MAX_FILE)}.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${name} is not a text file.`);
  }
  // No text has these, and many binary formats that happen to be UTF-8 do.
  if (/[\0-\x08\x0e-\x1a]/.test(text)) throw new Error(`${name} is not a text file.`);
  return { name, text: text.replaceAll("\r\n", "\n"), size: file.size };
}

/** A name that stands in one line of Markdown. */
function cleanName(name) {
  return String(name).replace(/[^\p{L}\p{M}\p{N}_./ ()-]/gu, "_").slice(-80).trim() || "file";
}

/** A number of bytes for people. */
export function fileSize(bytes) {
  const [number, unit] = bytes < 1024 ? [bytes, "B"] : [Math.round(bytes / 1024), "KiB"];
  return `${number.toLocaleString("en")} ${unit}`;
}

/** The file as Markdown; its fence is longer than any inside. */
export function fileBlock({ name, text }) {
  const longest = (text.match(/`{3,}/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  const ending = /\.(\w+)$/.exec(name)?.[1].toLowerCase();
  return `${fence}${LANGUAGES.get(ending) ?? "text"} ${name}\n${text.replace(/\n$/, "")}\n${fence}`;
}
