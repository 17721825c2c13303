"""The operating system's files: direct I/O and unnamed temporaries where the file system can."""

import errno
import fcntl
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, Self

from typing_extensions import override

from kvstrata.core.errors import ConfigError
from kvstrata.core.settings import join
from kvstrata.tiers.fs.disk import (
    DIR_MODE,
    FILE_MODE,
    Disk,
    FileStat,
    FoundFile,
    OpenFile,
    decode_times,
    encode_times,
)
from kvstrata.tiers.fs.layout import (
    FAN_DIRS,
    NAMESPACE_DIR,
    PRIVATE_DIR,
    TEMPORARY,
    TEMPORARY_DIR,
    key_of,
)
from kvstrata.tiers.fs.settings import DirectMode, FsSettings

logger = logging.getLogger("kvstrata.fs")

_NO_UNNAMED: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_FLAGS: Final = struct.Struct("i")
_GET_FLAGS: Final = 0x80086601  # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS, what chattr(1) uses
_SET_FLAGS: Final = 0x40086602
_TOP_DIR: Final = 0x20000  # FS_TOPDIR_FL


def _umask() -> int:
    """Return the process's umask without changing it; all ones where the system does not tell."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o777


class RealDisk(Disk):
    """The operating system's files, with direct I/O and unnamed temporaries where it can."""

    @classmethod
    def open_root(cls, settings: FsSettings, path: str) -> Self:
        """Open the root that settings name.

        Raises:
            ConfigError: It can't be made, opened or written, or not with direct I/O where that is
                asked for; the text names the setting.
        """
        try:
            disk = cls(settings.root, settings.direct)
        except OSError as error:
            raise ConfigError(join(path, "root"), f"can't use {settings.root}: {error}") from error
        if settings.direct is DirectMode.ON:
            try:
                disk.discard(disk.create(PRIVATE_DIR))
            except OSError as error:
                disk.close()
                raise ConfigError(
                    join(path, "direct"), f"{settings.root} can't do direct I/O: {error}"
                ) from error
        return disk

    def __init__(self, root: Path, direct: DirectMode = DirectMode.AUTO) -> None:
        """Open the root, which is made if it is not there."""
        self.owner = 0
        self.root = root = root.absolute()
        self.uses_direct = direct is not DirectMode.OFF
        self._may_fall_back = direct is DirectMode.AUTO
        self.uses_unnamed = os.path.isdir("/proc/self/fd")
        self._numbers = count()
        self._umask = _umask()
        if not root.is_dir():
            root.mkdir(parents=True)
            root.chmod(DIR_MODE)
        self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.make_dir(PRIVATE_DIR)

    @override
    def close(self) -> None:
        os.close(self._root_fd)

    def make_dir(self, path: str) -> None:
        """Make a directory and those above it, for the owner only."""
        try:
            os.mkdir(path, DIR_MODE, dir_fd=self._root_fd)
            os.chmod(path, DIR_MODE, dir_fd=self._root_fd)  # whatever the umask
        except FileExistsError:
            pass
        except FileNotFoundError:
            if "/" not in path:
                raise
            self.make_dir(path.rpartition("/")[0])
            self.make_dir(path)

    @override
    def make_fan(self, directory: str, first: str) -> None:
        self._make_spread_dir(directory)
        self._make_spread_dir(f"{directory}/{first}")
        for second in FAN_DIRS:
            self.make_dir(f"{directory}/{first}/{second}")

    def _make_spread_dir(self, path: str) -> None:
        """Make a directory below which a file system of the ext family spreads directories.

        Files then go to many block groups instead of one after the other. It matters because such
        a file system doesn't reuse an inode for minutes: in a group where many files have just been
        removed, each new one takes 20 times as long.
        """
        self.make_dir(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root_fd)
        try:
            (flags,) = _FLAGS.unpack(fcntl.ioctl(fd, _GET_FLAGS, bytes(_FLAGS.size)))
            fcntl.ioctl(fd, _SET_FLAGS, _FLAGS.pack(flags | _TOP_DIR))
        except OSError:
            pass  # another kind of file system
        finally:
            os.close(fd)

    @override
    def create(self, near: str) -> OpenFile:
        flags = os.O_WRONLY | self._direct_flag()
        try:
            file = self._create_unnamed(near, flags) or self._create_named(flags)
        except FileNotFoundError:
            self.make_dir(near)
            self.make_dir(TEMPORARY_DIR)
            return self.create(near)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            self._fall_back(error)
            return self.create(near)
        if self._umask & FILE_MODE:
            os.fchmod(file.fd, FILE_MODE)  # whatever the umask
        return file

    @override
    def write(self, file: OpenFile, buffers: Sequence[memoryview]) -> int:
        try:
            return os.pwritev(file.fd, buffers, 0)
        except OSError as error:
            self._make_buffered(file, error)
            return os.pwritev(file.fd, buffers, 0)

    @override
    def set_times(self, file: OpenFile | str, used_at_s: float, expires_at_s: float) -> None:
        times = encode_times(used_at_s, expires_at_s)
        if isinstance(file, OpenFile):
            os.utime(file.fd, ns=times)
        else:
            os.utime(file, ns=times, dir_fd=self._root_fd, follow_symlinks=False)

    @override
    def publish(self, file: OpenFile, path: str) -> bool:
        try:
            if file.name is None:  # `dst_dir_fd` makes it linkat(2), which follows this link
                os.link(f"/proc/self/fd/{file.fd}", path, dst_dir_fd=self._root_fd)
            else:
                self._link_named(file.name, path)
        except FileExistsError:
            return False
        return True

    @override
    def discard(self, file: OpenFile) -> None:
        os.close(file.fd)
        if file.name is not None:
            self.remove(file.name)

    @override
    def open(self, path: str) -> OpenFile:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags | self._direct_flag() | os.O_NOATIME, dir_fd=self._root_fd)
        except PermissionError:  # O_NOATIME is for the file's owner only
            fd = os.open(path, flags | self._direct_flag(), dir_fd=self._root_fd)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct_flag():
                raise
            self._fall_back(error)
            return self.open(path)
        return OpenFile(fd)

    @override
    def read(self, file: OpenFile, buffers: Sequence[memoryview]) -> int:
        try:
            return os.preadv(file.fd, buffers, 0)
        except OSError as error:
            self._make_buffered(file, error)
            return os.preadv(file.fd, buffers, 0)

    @override
    def stat(self, path: str) -> FileStat | None:
        try:
            return decode_times(os.stat(path, dir_fd=self._root_fd, follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return None

    @override
    def remove(self, path: str) -> bool:
        try:
            os.unlink(path, dir_fd=self._root_fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    @override
    def scan(self) -> Iterator[FoundFile]:
        for directory in self.list_dir("", NAMESPACE_DIR.fullmatch):
            for first in self.list_dir(directory, FAN_DIRS.__contains__):
                for second in self.list_dir(f"{directory}/{first}", FAN_DIRS.__contains__):
                    yield from self._scan_leaf(directory, f"{directory}/{first}/{second}")

    @override
    def free_bytes(self) -> int:
        found = os.fstatvfs(self._root_fd)
        return found.f_bavail * found.f_frsize

    def list_dir(self, path: str, is_ours: Callable[[str], object]) -> list[str]:
        """Return the names of our directories in a directory; symbolic links are not ours."""
        with suppress(FileNotFoundError), os.scandir(self.root / path) as found:
            return [
                each.name
                for each in found
                if is_ours(each.name) and each.is_dir(follow_symlinks=False)
            ]
        return []

    @override
    def remove_empty_dirs(self, directory: str) -> None:
        firsts = [f"{directory}/{n}" for n in self.list_dir(directory, FAN_DIRS.__contains__)]
        for first in firsts:
            for second in self.list_dir(first, FAN_DIRS.__contains__):
                self._remove_dir(f"{first}/{second}")
            self._remove_dir(first)
        self._remove_dir(directory)

    @override
    def list_temporaries(self) -> Mapping[str, int]:
        with suppress(FileNotFoundError):
            names = os.listdir(self.root / TEMPORARY_DIR)
            return {
                f"{TEMPORARY_DIR}/{name}": int(match[1])
                for name in names
                if (match := TEMPORARY.fullmatch(name))
            }
        return {}

    def _scan_leaf(self, directory: str, path: str) -> Iterator[FoundFile]:
        with suppress(FileNotFoundError), os.scandir(self.root / path) as found:
            for each in found:
                key = key_of(each.name)
                if key is not None and each.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        stat = decode_times(each.stat(follow_symlinks=False))
                        yield FoundFile(directory, f"{path}/{each.name}", key, stat)

    def _remove_dir(self, path: str) -> None:
        with suppress(OSError):  # something is in it
            os.rmdir(path, dir_fd=self._root_fd)

    def _create_unnamed(self, near: str, flags: int) -> OpenFile | None:
        if not self.uses_unnamed:
            return None
        try:
            flags |= os.O_TMPFILE | os.O_CLOEXEC
            return OpenFile(os.open(near, flags, FILE_MODE, dir_fd=self._root_fd))
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
        self.uses_unnamed = False
        return None

    def _create_named(self, flags: int) -> OpenFile:
        name = f"{TEMPORARY_DIR}/{self.owner}-{next(self._numbers)}"
        flags |= os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return OpenFile(os.open(name, flags, FILE_MODE, dir_fd=self._root_fd), name)

    def _link_named(self, name: str, path: str) -> None:
        fd = self._root_fd
        try:
            os.link(name, path, src_dir_fd=fd, dst_dir_fd=fd)
        except FileNotFoundError:
            self.make_dir(path.rpartition("/")[0])
            os.link(name, path, src_dir_fd=fd, dst_dir_fd=fd)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if self.stat(path) is not None:
                raise FileExistsError(path) from error
            self.make_dir(path.rpartition("/")[0])
            os.rename(name, path, src_dir_fd=fd, dst_dir_fd=fd)

    def _direct_flag(self) -> int:
        return os.O_DIRECT if self.uses_direct else 0

    def _fall_back(self, error: OSError) -> None:
        """Stop using direct I/O, with one warning, or raise the error where that is not allowed."""
        if not self._may_fall_back:
            raise error
        if self.uses_direct:
            self.uses_direct = False
            logger.warning("%s: direct I/O is refused (%s); files go buffered", self.root, error)

    def _make_buffered(self, file: OpenFile, error: OSError) -> None:
        """Take direct I/O off one open file if that is what the error is about; raise it if not."""
        flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise error
        self._fall_back(error)
        fcntl.fcntl(file.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
