"""A conversation of two turns, and an answer that is shown while it is generated."""

from server import client, model

messages = [{"role": "user", "content": "What is 7 plus 5?"}]
answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
print(answer.choices[0].message.content)
print(f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out")

# The server keeps no conversation: each request brings all of it. What it has in common with an earlier
# request is found in the prefix cache and not computed again.
messages.append({"role": "assistant", "content": answer.choices[0].message.content})
messages.append({"role": "user", "content": "Tell me a story about a fox."})
for chunk in client.chat.completions.create(model=model, messages=messages, stream=True, max_tokens=120):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
