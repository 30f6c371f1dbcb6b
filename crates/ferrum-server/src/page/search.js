// Search in conversations: all words have to be in a title or in one message.

const AROUND = 60;
/** Characters that are searched of one message. */
const LONGEST = 200_000;

/** What is searched of a conversation, once for many queries. */
export function searchable({ id, title, updated, nodes }) {
  const messages = nodes.filter(({ content }) => content.trim() !== "");
  return {
    id,
    title,
    updated,
    folded: fold(title),
    messages: messages.map((node) => {
      const text = node.content.slice(0, LONGEST).replace(/\s+/g, " ");
      return { id: node.id, role: node.role, text, folded: fold(text) };
    }),
  };
}

/** Lower case of the same length, so that what is found has the same place in both. */
function fold(text) {
  const lower = text.toLowerCase();
  return lower.length === text.length ? lower : [...text].map((char) => (char.toLowerCase().length === char.length ? char.toLowerCase() : char)).join("");
}

/**
 * What fits a query, at most `most`: `{id, title, node?, parts?}`, where `parts` is the place of a message in
 * pieces `{text, found}`. Titles come first, then the newest. Without words: the newest conversations.
 */
export function searchChats(chats, query, most = 30) {
  const words = fold(query).split(/\s+/).filter((word) => word !== "");
  const newest = [...chats].sort((a, b) => b.updated - a.updated);
  const all = (text) => words.every((word) => text.includes(word));
  const titled = newest.filter(({ folded }) => all(folded)).map(({ id, title }) => ({ id, title }));
  if (words.length === 0) return titled.slice(0, most);
  const inside = [];
  for (const { id, title, messages } of newest) {
    if (inside.length >= most) break;
    const message = messages.find(({ folded }) => all(folded));
    if (message) inside.push({ id, title, node: message.id, parts: excerpt(message, words) });
  }
  // A conversation is listed once, with its place if there is one.
  const places = new Map(inside.map((found) => [found.id, found]));
  const first = titled.map((found) => places.get(found.id) ?? found);
  const ids = new Set(first.map(({ id }) => id));
  return [...first, ...inside.filter(({ id }) => !ids.has(id))].slice(0, most);
}

function excerpt({ text, folded }, words) {
  const at = Math.min(...words.map((word) => folded.indexOf(word)));
  const from = Math.max(0, at - AROUND / 2);
  const to = Math.min(text.length, at + AROUND * 2);
  const parts = [];
  let place = from;
  while (place < to) {
    const next = words.map((word) => ({ word, at: folded.indexOf(word, place) })).filter((found) => found.at >= 0 && found.at < to);
    const nearest = next.sort((a, b) => a.at - b.at || b.word.length - a.word.length)[0];
    const end = nearest ? nearest.at : to;
    if (end > place) parts.push({ text: text.slice(place, end), found: false });
    if (nearest) parts.push({ text: text.slice(end, end + nearest.word.length), found: true });
    place = nearest ? end + nearest.word.length : to;
  }
  if (from > 0) parts.unshift({ text: "…", found: false });
  if (place < text.length) parts.push({ text: "…", found: false });
  return parts;
}
