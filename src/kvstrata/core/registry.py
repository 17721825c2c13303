"""Find a class by built-in name, entry point or `module:Class`."""

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from kvstrata.core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one kind of class; the built-in ones are imported only when they are asked for."""

    def __init__(
        self, base: type[T], builtin: Mapping[str, str], entry_point_group: str | None = None
    ) -> None:
        """Take the built-in names, each with its `module:Class`.

        Args:
            base: What every class must derive from.
            builtin: Name to `module:Class`.
            entry_point_group: Group of installed entry points that add names; None for none.
        """
        self._base = base
        self._builtin = dict(builtin)
        self._group = entry_point_group

    def names(self) -> list[str]:
        """Return every name that `get` knows, sorted; paths come on top of these."""
        found = set(self._builtin)
        if self._group:
            found.update(point.name for point in entry_points(group=self._group))
        return sorted(found)

    def get(self, name: str, path: str) -> type[T]:
        """Return the class of this name.

        Args:
            name: A built-in name, an entry point's name, or `package.module:Class`.
            path: Dotted path of the setting that names it, for errors.

        Raises:
            ConfigError: Nothing has this name, it can't be imported, or is of the wrong kind.
        """
        target = self._builtin.get(name) or (name if ":" in name else None)
        if target is None and self._group:
            for point in entry_points(group=self._group, name=name):
                target = point.value
        if target is None:
            near = difflib.get_close_matches(name, self.names(), n=1)
            advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(self.names())}"
            raise ConfigError(path, f"unknown {self._base.__name__} {name!r}; {advice}")
        module_name, _, attribute = target.partition(":")
        try:
            found = getattr(import_module(module_name), attribute)
        except ImportError as error:
            raise ConfigError(path, f"{name!r} can't be imported: {error}") from error
        except AttributeError as error:
            raise ConfigError(path, f"{module_name} has no class {attribute!r}") from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigError(path, f"{target} is not a {self._base.__name__}")
        return found
