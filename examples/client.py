"""Ask a model behind an OpenAI-compatible server: vLLM, transformers serve, llama.cpp, Ollama.

    python examples/client.py output/rlhf/1.3b "Name a fruit."
    python examples/client.py mine "Name a fruit." --url http://127.0.0.1:11434/v1

Standard library only. OPENAI_API_KEY is sent if it is set.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request

# Seconds without data after which a request has failed.
TIMEOUT = 600


def main() -> None:
    """Print the response to a prompt."""
    parser = argparse.ArgumentParser(description="Ask a model behind an OpenAI-compatible server.")
    parser.add_argument("model", help="name of the model at the server")
    parser.add_argument("prompt")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    turns = [("system", options.system), ("user", options.prompt)]
    request = {
        "model": options.model,
        "messages": [{"role": role, "content": text} for role, text in turns if text],
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    try:
        reply = post(f"{options.url}/chat/completions", request)
        print(reply["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {options.url}: status {error.code}: {error.read().decode()[:300]}")
    except OSError as error:
        sys.exit(f"error: {options.url}: {error}")
    except (LookupError, TypeError, ValueError):
        sys.exit(f"error: {options.url} did not send a chat completion")


def post(url: str, body: dict[str, object]) -> dict[str, list[dict[str, dict[str, str]]]]:
    """Send JSON and return the JSON of the reply."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        result: dict[str, list[dict[str, dict[str, str]]]] = json.load(reply)
    return result


if __name__ == "__main__":
    main()
