// An answer, and one that is shown while it is generated.

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1",
  // The client wants a key, also where the server asks for none.
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});
const model = (await client.models.list()).data[0].id;

const answer = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "What is 7 plus 5?" }],
  temperature: 0,
});
console.log(answer.choices[0].message.content);

const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "Tell me a story about a fox." }],
  stream: true,
  max_tokens: 120,
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}
process.stdout.write("\n");
