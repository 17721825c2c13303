"""Read settings from files and the environment; every way ends in `Config.parse`."""

import json
import os
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError

ENV_PREFIX: Final = "KVSTRATA__"


def load_config(source: Mapping[str, Any] | Config | str | Path) -> Config:
    """Make a Config from a mapping, or from a TOML, JSON or YAML file.

    Environment variables go over a file: `KVSTRATA__PRIMARY__BYTES=8GiB`,
    `KVSTRATA__TIERS__0__ROOT=/nvme/kv`.

    Raises:
        ConfigError: The file can't be read, or a setting in it is wrong, by dotted path.
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, Mapping):
        return Config.parse(source)
    return Config.parse(over(read_file(Path(source)), read_environment(os.environ)))


def read_file(path: Path) -> Mapping[str, Any]:
    """Return the table in a file, by its ending: .toml, .json, .yaml or .yml.

    Raises:
        ConfigError: It can't be read or is not a table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        match path.suffix:
            case ".toml":
                table = tomllib.loads(text)
            case ".json":
                table = json.loads(text)
            case ".yaml" | ".yml":
                table = import_module("yaml").safe_load(text)
            case other:
                raise ConfigError(str(path), f"can't read {other!r} files: .toml, .json or .yaml")
    except ImportError as error:
        raise ConfigError(str(path), "reading YAML needs the package PyYAML") from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(path), str(error)) from error
    if not isinstance(table, Mapping):
        raise ConfigError(str(path), "must hold a table of settings")
    return table


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in environment variables as a nested table.

    `__` goes one level down; a number is a place in a list.
    """
    table: dict[str, Any] = {}
    for name, value in sorted(environment.items()):
        if name.startswith(ENV_PREFIX):
            *path, last = name.removeprefix(ENV_PREFIX).lower().split("__")
            level = table
            for part in path:
                level = level.setdefault(part, {})
            level[last] = value
    return {name: _as_list(value) for name, value in table.items()}


def _as_list(value: Any) -> Any:  # noqa: ANN401
    """Turn tables whose keys are all numbers into lists."""
    if not isinstance(value, dict):
        return value
    inner = {name: _as_list(part) for name, part in value.items()}
    if inner and all(name.isdigit() for name in inner):
        return [inner[name] for name in sorted(inner, key=int)]
    return inner


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one table over another: tables and lists entry by entry, everything else as a whole."""
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[name] = over(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            merged = [
                over(a, b) if isinstance(a, Mapping) and isinstance(b, Mapping) else b
                for a, b in zip(old, value, strict=False)
            ]
            result[name] = merged + value[len(old) :] + old[len(value) :]
        else:
            result[name] = value
    return result
