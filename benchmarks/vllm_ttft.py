"""Time to first token in vLLM: no connector, its own prefix cache, kvstrata, and LMCache beside it.

    python benchmarks/vllm_ttft.py MODEL [--lmcache FOLDER] [--json]

MODEL is a folder; FOLDER holds LMCache, installed with `pip install --target`. Every variant is an
engine in processes of its own, all are up at the same time, and each prompt goes to one variant
after the other: what else the machine does hits all of them alike. Compute threads are pinned alike
(`VLLM_CPU_OMP_THREADS_BIND`), because a connector changes what vLLM chooses by itself. At the end
kvstrata is restarted and served from its files, and its throughput without any reuse is measured
against that of no connector.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

PORT, HTTP_PORT = 5599, 8099
TOKENS_PER_BLOCK = 128
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}  # fmt: skip


def connector_of(variant: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the argument that loads a variant's connector."""
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if variant == "kvstrata":
        tier = {"type": "fs", "root": options.root, "max_bytes": options.host_bytes}
        extra = {"primary": {"bytes": options.host_bytes}, "tiers": [tier]}
        return {
            **common,
            "kv_connector": "KVStrataConnector",
            "kv_connector_module_path": "kvstrata.integrations.vllm",
            "kv_connector_extra_config": extra,
        }
    if variant == "lmcache":
        extra = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": PORT,
            "lmcache.mp.mq_timeout": 15,
        }
        return {**common, "kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
    return None


def serve(options: argparse.Namespace) -> None:
    """Be one variant's engine: a command per line in, an answer per line out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints goes to stderr
    from vllm import LLM, SamplingParams, TokensPrompt

    variant = options.child
    connector = connector_of(variant, options)
    own_cache = variant == "own-cache"
    llm = LLM(
        options.model, dtype=options.dtype, block_size=TOKENS_PER_BLOCK, max_model_len=2048,
        num_gpu_blocks_override=options.many_blocks if own_cache else 20,
        enforce_eager=True, disable_log_stats=False, seed=0,
        prefix_caching_hash_algo="sha256_cbor",
        **({"kv_transfer_config": connector} if connector else {}),
    )  # fmt: skip

    def run(batch: list[list[int]], num_new: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=tokens) for tokens in batch], params, use_tqdm=False
        )
        return {
            "ttft_s": outputs[0].metrics.first_token_latency,
            "total_s": time.perf_counter() - start,
            "cached": outputs[0].num_cached_tokens,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }

    run([random.Random(0).choices(range(3, 1000), k=200)], 4)  # the first request warms up
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command == "quit":
            break
        if command == "reset":
            answer: Any = own_cache or llm.reset_prefix_cache()
        else:
            answer = run(*command)
        print(json.dumps(answer), file=answers, flush=True)


class Variant:
    """A running engine."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--child", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
            start_new_session=True,
        )  # fmt: skip

    def answer(self) -> Any:  # noqa: ANN401
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine of variant {self.name} ended")
        return json.loads(line)

    def ask(self, command: object) -> Any:  # noqa: ANN401
        print(json.dumps(command), file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        print('"quit"', file=self.process.stdin, flush=True)
        try:
            self.process.wait(60)
        finally:
            end_group(self.process)


def end_group(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start_lmcache(gib: float, environment: dict[str, str]) -> subprocess.Popen:
    """Start LMCache's own process; what holds the bytes and is asked over sockets."""
    arguments = [
        "server", "--host", "127.0.0.1", "--port", str(PORT), "--l1-size-gb", str(gib),
        "--eviction-policy", "LRU", "--chunk-size", str(TOKENS_PER_BLOCK),
        "--http-host", "127.0.0.1", "--http-port", str(HTTP_PORT), "--disable-metrics",
        "--supported-transfer-mode", "auto",
    ]  # fmt: skip
    code = "import sys; from lmcache.cli.main import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def measure(options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Run all variants and return the medians, in seconds."""
    rng = random.Random(11)
    prompts = [rng.choices(range(3, 1000), k=options.tokens) for _ in range(options.prompts)]
    arguments = [options.model, "--dtype", options.dtype, "--root", options.root,
                 "--many-blocks", str(options.prompts * (options.tokens // 128 + 2) + 20),
                 "--host-bytes", str(options.host_bytes)]  # fmt: skip
    names = ["none", "own-cache", "kvstrata"] + (["lmcache"] if options.lmcache else [])
    peer = None
    if options.lmcache:
        peer = start_lmcache(options.host_bytes / 2**30, environment)
    variants = []
    try:
        variants += [Variant(name, arguments, environment) for name in names]
        for variant in variants:
            variant.answer()
        result = {**rounds(variants, prompts, options), "variants": names}
        result["throughput_ratio"] = throughput(variants[0], variants[2], options)
        variants.pop(2).close()
        variants.append(Variant("kvstrata", arguments, environment))
        variants[-1].answer()
        again = [variants[-1].ask([[tokens], 8]) for tokens in prompts]
        result["ttft_s"]["kvstrata, restarted"] = {"warm": median(a["ttft_s"] for a in again)}
        result["cached"]["kvstrata, restarted"] = min(a["cached"] for a in again)
        result["same_tokens"]["kvstrata, restarted"] = sum(
            a["tokens"] == t for a, t in zip(again, result["tokens"], strict=True)
        )
    finally:
        for variant in variants:
            variant.close()
        if peer is not None:
            end_group(peer)
    del result["tokens"]
    return result


def rounds(
    variants: list[Variant], prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Each prompt to each variant, a cold round and warm ones."""
    cold: dict[str, list[float]] = {v.name: [] for v in variants}
    warm: dict[str, list[float]] = {v.name: [] for v in variants}
    cached = {v.name: 1 << 30 for v in variants}
    same = dict.fromkeys(cached, 0)
    expected: list[Any] = []
    for number in range(1 + options.rounds):
        for variant in variants:
            variant.ask("reset")
        for i, tokens in enumerate(prompts):
            for variant in variants:
                if number > 1 and variant.name == "none":
                    continue  # it is as cold as ever
                answer = variant.ask([[tokens], 8])
                (warm if number else cold)[variant.name].append(answer["ttft_s"])
                if number == 0 and variant.name == "none":
                    expected.append(answer["tokens"])
                if number == 1:
                    same[variant.name] += answer["tokens"] == expected[i]
                if number and variant.name != "none":
                    cached[variant.name] = min(cached[variant.name], answer["cached"])
    cached["none"] = 0
    return {
        "ttft_s": {name: {"cold": median(cold[name]), "warm": median(warm[name])} for name in cold},
        "cached": cached,
        "same_tokens": same,
        "tokens": expected,
    }


def throughput(plain: Variant, ours: Variant, options: argparse.Namespace) -> float:
    """Return how much is done with the connector and no reuse, relative to without it."""
    rng = random.Random(12)
    ratios = []
    for _ in range(options.throughput_rounds):
        batch = [rng.choices(range(3, 1000), k=300) for _ in range(6)]
        took = [variant.ask([batch, 40])["total_s"] for variant in (plain, ours)]
        ratios.append(took[0] / took[1])
    return median(ratios) if ratios else float("nan")


def show(result: dict[str, Any], num_prompts: int) -> None:
    print(f"{'variant':24}{'cold ms':>10}{'warm ms':>10}{'reused':>8}{'same tokens':>14}")
    for name, times in result["ttft_s"].items():
        cold = f"{times['cold'] * 1e3:.0f}" if "cold" in times else ""
        same = f"{result['same_tokens'][name]}/{num_prompts}"
        print(
            f"{name:24}{cold:>10}{times['warm'] * 1e3:>10.0f}{result['cached'][name]:>8}{same:>14}"
        )
    print(
        f"throughput with the connector and no reuse: {result['throughput_ratio']:.3f} of without"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--lmcache", help="folder that LMCache was installed into")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=2, help="warm rounds")
    parser.add_argument("--throughput-rounds", type=int, default=5)
    parser.add_argument("--host-bytes", type=int, default=2 << 30)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--root", default="", help=argparse.SUPPRESS)
    parser.add_argument("--many-blocks", type=int, default=100, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options)
        return
    environment = {**ENVIRONMENT, **os.environ}
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    if options.lmcache:
        paths = [os.environ.get("PYTHONPATH", ""), str(Path(options.lmcache).resolve())]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as root:
        options.root = root
        result = measure(options, environment)
    if options.json:
        print(json.dumps(result))
    else:
        show(result, options.prompts)


if __name__ == "__main__":
    main()
