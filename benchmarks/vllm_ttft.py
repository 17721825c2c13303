"""Time to first token in vLLM: no connector, its own prefix cache, kvstrata, and LMCache beside it.

    python benchmarks/vllm_ttft.py MODEL [--lmcache FOLDER] [--json]
    python benchmarks/vllm_ttft.py MODEL --throughput [--json]

MODEL is a folder; FOLDER holds LMCache, installed with `pip install --target`. Every variant is an
engine in processes of its own, all are up at the same time, and each prompt goes to one variant
after the other: what else the machine does hits all of them alike. Compute threads are pinned alike
(`VLLM_CPU_OMP_THREADS_BIND`), because a connector changes what vLLM chooses by itself. At the end
kvstrata is restarted and served from its files.

With `--throughput` no prompt comes twice, and what is measured is the time for a batch: of kvstrata
and of a second engine without a connector (what that differs by is noise), each relative to the
first one without. Batches are short and many. The first engine is always in the middle (A B C, then
C B A), and the answer is the median of the ratios of neighbours. With `--in-process` each engine is
one process, and the CPU time that it takes, copies included, is compared as well: a busy machine
spoils that much less.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

PORT, HTTP_PORT = 5599, 8099
TOKENS_PER_BLOCK = 128
CONTROL, RESTARTED = "none, again", "kvstrata, restarted"
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
        start, start_cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=tokens) for tokens in batch], params, use_tqdm=False
        )
        return {
            "ttft_s": outputs[0].metrics.first_token_latency,
            "total_s": time.perf_counter() - start,
            "cpu_s": time.process_time() - start_cpu,
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
        try:
            with suppress(BrokenPipeError):
                print('"quit"', file=self.process.stdin, flush=True)
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
    """Run all variants and return the median times to the first token, in seconds."""
    rng = random.Random(11)
    prompts = [rng.choices(range(3, 1000), k=options.tokens) for _ in range(options.prompts)]
    names = ["none", "own-cache", "kvstrata"] + (["lmcache"] if options.lmcache else [])
    arguments = arguments_of(options)
    peer = None
    if options.lmcache:
        peer = start_lmcache(options.host_bytes / 2**30, environment)
    try:
        with running(names, arguments, environment) as variants:
            result = rounds(variants, prompts, options)
        with running(["kvstrata"], arguments, environment) as (restarted,):
            again = [restarted.ask([[tokens], 8]) for tokens in prompts]
    finally:
        if peer is not None:
            end_group(peer)
    expected = result.pop("tokens")
    result["ttft_s"][RESTARTED] = {"warm": median(a["ttft_s"] for a in again)}
    result["cached"][RESTARTED] = min(a["cached"] for a in again)
    result["same_tokens"][RESTARTED] = sum(
        a["tokens"] == tokens for a, tokens in zip(again, expected, strict=True)
    )
    return result


def arguments_of(options: argparse.Namespace) -> list[str]:
    """Return what every engine is started with."""
    many_blocks = options.prompts * (options.tokens // TOKENS_PER_BLOCK + 2) + 20
    return [options.model, "--dtype", options.dtype, "--root", options.root,
            "--many-blocks", str(many_blocks), "--host-bytes", str(options.host_bytes)]  # fmt: skip


@contextmanager
def running(
    names: list[str], arguments: list[str], environment: dict[str, str]
) -> Iterator[list[Variant]]:
    """Engines that are all ready, and gone at the end."""
    variants: list[Variant] = []
    try:
        for name in names:
            variants.append(Variant(name, arguments, environment))
            variants[-1].answer()
        yield variants
    finally:
        for variant in variants:
            variant.close()


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


def throughput(options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Return how much is done with a connector and no reuse, relative to without one."""
    rng = random.Random(12)
    names = ["kvstrata", "none", CONTROL]
    answers: dict[str, list[Any]] = {name: [] for name in names}
    with running(names, arguments_of(options), environment) as variants:
        for _ in range(options.batches):
            batch = [rng.choices(range(3, 1000), k=options.batch_tokens) for _ in range(6)]
            for variant in variants:
                answers[variant.name].append(variant.ask([batch, options.batch_new]))
            variants.reverse()
    result: dict[str, Any] = {"batch_s": median(answer["total_s"] for answer in answers["none"])}
    measures = {"throughput": "total_s", "per_cpu_s": "cpu_s"}
    for name in (names[0], names[2]):
        result[name] = {
            measure: ratios(answers["none"], answers[name], field)
            for measure, field in measures.items()
            if options.in_process or field == "total_s"
        }
    return result


def ratios(plain: list[Any], other: list[Any], field: str) -> dict[str, float]:
    """Return the median and the quartiles of the ratios of neighbours."""
    low, middle, high = quantiles((a[field] / b[field] for a, b in zip(plain, other, strict=True)))
    return {"median": middle, "low": low, "high": high}


def show(result: dict[str, Any], num_prompts: int) -> None:
    print(f"{'variant':24}{'cold ms':>10}{'warm ms':>10}{'reused':>8}{'same tokens':>14}")
    for name, times in result["ttft_s"].items():
        cold = f"{times['cold'] * 1e3:.0f}" if "cold" in times else ""
        same = f"{result['same_tokens'][name]}/{num_prompts}"
        print(
            f"{name:24}{cold:>10}{times['warm'] * 1e3:>10.0f}{result['cached'][name]:>8}{same:>14}"
        )


def show_throughput(result: dict[str, Any]) -> None:
    print(f"no connector: {result.pop('batch_s'):.2f} s for a batch; beside it, no reuse:")
    for name, measures in result.items():
        for measure, found in measures.items():
            spread = f"({found['low']:.3f} to {found['high']:.3f})"
            print(f"{name:12}{measure.replace('_', ' '):12}{found['median']:.3f} {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--lmcache", help="folder that LMCache was installed into")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=2, help="warm rounds")
    parser.add_argument("--throughput", action="store_true", help="batches without reuse instead")
    parser.add_argument(
        "--in-process", action="store_true", help="with --throughput: also CPU time"
    )
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--batch-tokens", type=int, default=150, help="of each of its six prompts")
    parser.add_argument("--batch-new", type=int, default=10, help="tokens that each generates")
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
    if options.in_process:
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    if options.lmcache:
        paths = [os.environ.get("PYTHONPATH", ""), str(Path(options.lmcache).resolve())]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as root:
        options.root = root
        run = throughput if options.throughput else measure
        result = run(options, environment)
    if options.json:
        print(json.dumps(result))
    elif options.throughput:
        show_throughput(result)
    else:
        show(result, options.prompts)


if __name__ == "__main__":
    main()
