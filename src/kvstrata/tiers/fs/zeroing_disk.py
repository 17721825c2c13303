"""A disk that overwrites what it removes."""

import os
from typing import Final

from typing_extensions import override

from kvstrata.tiers.fs.real_disk import RealDisk

_ZEROS: Final = bytes(2**20)


class ZeroingDisk(RealDisk):
    """Writes zeros over a file, through to the medium, before its name goes.

    A file system that copies on write, or a drive that maps blocks, may keep the old bytes all the
    same; nobody finds them through the file.
    """

    @override
    def remove(self, path: str) -> bool:
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, dir_fd=self._root_fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            num_left = os.fstat(fd).st_size
            while num_left:
                num_left -= os.write(fd, _ZEROS[:num_left])
            os.fdatasync(fd)
        finally:
            os.close(fd)
        return super().remove(path)
