"""Ask a server the same long prompts twice and print what the second time saves.

    python client.py [--url http://127.0.0.1:8000] [--prompts 6] [--words 1200]

The prompts together should be larger than the engine's own KV cache: what is still there needs no
offloading. Only the standard library is needed.
"""

import argparse
import json
import random
import time
import urllib.request
from statistics import median

WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "haven",
    "inlet",
    "jetty",
    "knoll",
    "lagoon",
    "mesa",
    "north",
]


def post(url: str, path: str, body: dict) -> urllib.request.Request:
    return urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def first_token_s(url: str, model: str, prompt: str, hints: dict) -> tuple[float, str]:
    """Return the time to the first token, and the text."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True,
        "kv_transfer_params": {"kvstrata": hints},
    }  # fmt: skip
    start, first, text = time.perf_counter(), 0.0, ""
    with urllib.request.urlopen(post(url, "/v1/completions", body), timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - start
            text += json.loads(line[6:])["choices"][0]["text"]
    return first, text


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--words", type=int, default=1200)
    parser.add_argument("--tenant", help="whose chunks these are; tenants never share")
    options = parser.parse_args()
    with urllib.request.urlopen(options.url + "/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    rng = random.Random()
    prompts = [" ".join(rng.choices(WORDS, k=options.words)) for _ in range(options.prompts)]
    hints = {"tenant": options.tenant} if options.tenant else {}
    rounds = []
    for name in ("first round", "second round"):
        hits = metric(options.url, "vllm:external_prefix_cache_hits_total")
        answers = [first_token_s(options.url, model, prompt, hints) for prompt in prompts]
        hits = metric(options.url, "vllm:external_prefix_cache_hits_total") - hits
        first = median(seconds for seconds, _ in answers)
        print(f"{name}: median time to first token {first * 1e3:7.0f} ms, {hits:.0f} tokens loaded")
        rounds.append((first, [text for _, text in answers]))
    (before, texts), (after, texts_again) = rounds
    same = "the same texts" if texts == texts_again else "texts differ (rounding; see the docs)"
    print(f"{before / after:.1f} times as fast to the first token, {same}")


if __name__ == "__main__":
    main()
