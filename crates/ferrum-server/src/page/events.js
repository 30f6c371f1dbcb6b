// Server-sent events out of pieces of bytes that end anywhere.

/** Takes pieces by `push`, which gives the data of the events that are complete. */
export class EventReader {
  #decoder = new TextDecoder();
  #rest = "";

  push(bytes) {
    this.#rest += this.#decoder.decode(bytes, { stream: true });
    const lines = this.#rest.split(/\r?\n/);
    // The last line may go on, and so may a line break.
    this.#rest = lines.pop();
    const found = [];
    for (const line of lines) {
      // Our events have one line of data each; all else (comments, names) says nothing here.
      if (line.startsWith("data:")) found.push(line.slice(5).trim());
    }
    return found;
  }
}
