"""Keep LLM key/value cache blocks: host memory first, then files, object stores and peers."""
