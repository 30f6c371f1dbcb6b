#!/bin/sh
# An answer that is held to a JSON schema while it is generated. The form always holds; what fills it is the
# model's, and the demo model has never seen JSON.
set -eu

url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
key=${OPENAI_API_KEY:-none}

curl --silent --show-error --fail-with-body "$url/chat/completions" \
    --header 'Content-Type: application/json' --header "Authorization: Bearer $key" --data '{
    "messages": [{"role": "user", "content": "What is 7 plus 5?"}],
    "temperature": 0,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "sum",
            "strict": true,
            "schema": {
                "type": "object",
                "properties": {"result": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["result"],
                "additionalProperties": false
            }
        }
    }
}'
echo
