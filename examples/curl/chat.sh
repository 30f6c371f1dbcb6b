#!/bin/sh
# One question with curl: first the whole answer, then the same answer as a stream of events.
set -eu

url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
key=${OPENAI_API_KEY:-none}

ask() {
    curl --silent --show-error --fail-with-body --no-buffer "$url/chat/completions" \
        --header 'Content-Type: application/json' --header "Authorization: Bearer $key" --data "$1"
}

ask '{
    "messages": [{"role": "user", "content": "What is 7 plus 5?"}],
    "temperature": 0
}'
echo

# Each event is a line `data: {…}` with the next piece of text; the last one is `data: [DONE]`.
ask '{
    "messages": [{"role": "user", "content": "What is 7 plus 5?"}],
    "temperature": 0,
    "stream": true
}'
