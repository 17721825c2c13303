"""The engine's own KV blocks: a pool per group, prefix caching by chained hashes, block tables."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvstrata.engine.model import NULL_BLOCK, KVGroup
from kvstrata.engine.request import Request


class BlockPool:
    """Blocks of one group, counted by use. A free block keeps its content until it is taken.

    Blocks leave the free list in the order in which they came to it, so a cached one is found again
    for as long as possible. Block 0, the null block, is never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make blocks 0 to `num_blocks` - 1, all free but the null block."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._uses = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._new: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out."""
        return len(self._free)

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this content, free or in use; None if there is none."""
        return self._block_of.get(block_hash)

    def is_free(self, block: int) -> bool:
        """Say whether nobody uses the block."""
        return block in self._free

    def take(self, count: int) -> list[int]:
        """Hand out free blocks, forgetting what they held. The caller has checked `num_free`."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._uses[block] = 1
            self._forget(block)
        self._new += blocks
        return blocks

    def share(self, block: int) -> None:
        """Use a cached block once more."""
        self._uses[block] += 1
        self._free.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        """Use blocks once less; the null block is ignored. Later blocks of a prefix come first."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._uses[block] -= 1
            if self._uses[block] == 0:
                self._free[block] = None

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let others find a block whose content is final, unless they can find such a one."""
        if block_hash not in self._block_of:
            self._forget(block)
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def take_new(self) -> list[int]:
        """Return the blocks handed out since the last call."""
        new, self._new = self._new, []
        return new

    def forget_cached(self) -> None:
        """Forget what blocks hold, so that nothing is found any more."""
        self._hash_of.clear()
        self._block_of.clear()

    def check(self) -> None:
        """Assert every invariant."""
        assert all((uses == 0) == (b in self._free) for b, uses in enumerate(self._uses) if b)
        assert {h: b for b, h in self._hash_of.items()} == self._block_of
        assert NULL_BLOCK not in self._free

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]


def tokens_per_hash(groups: Sequence[KVGroup]) -> int:
    """Return the grid on which tokens are hashed: every group's blocks are multiples of it."""
    return math.gcd(*(group.tokens_per_block for group in groups))


class BlockTables:
    """Gives requests blocks in every group, all or none, and shares equal prefixes."""

    def __init__(self, groups: Sequence[KVGroup], num_blocks: Sequence[int]) -> None:
        """Take the model's groups and each one's number of blocks, the null block included."""
        self._groups = tuple(groups)
        self._num_blocks = tuple(num_blocks)
        self.pools = [BlockPool(count) for count in num_blocks]
        self._tokens_per_hash = tokens_per_hash(groups)
        self._tokens_per_match = math.lcm(*(g.tokens_per_block for g in groups))

    def fits(self, num_tokens: int) -> bool:
        """Say whether a request of this many tokens can run alone."""
        return all(
            num_tokens <= (count - 1) * group.tokens_per_block
            for group, count in zip(self._groups, self._num_blocks, strict=True)
        )

    def match(self, request: Request) -> int:
        """Return how many tokens are cached: the longest prefix that every group can serve.

        A multiple of every group's `tokens_per_block`, and less than the request's tokens.
        """
        end = (request.num_tokens - 1) // self._tokens_per_match * self._tokens_per_match
        while end > 0:
            missing = min(self._cached_end(request, g, end) for g in range(len(self._groups)))
            if missing == end:
                return end
            end = min(missing, end - 1) // self._tokens_per_match * self._tokens_per_match
        return 0

    def _cached_end(self, request: Request, group: int, end: int) -> int:
        """Return `end`, or where the first block begins that the group needs and has not."""
        tokens_per_block = self._groups[group].tokens_per_block
        first = self._first_needed(group, end) // tokens_per_block
        for block in range(first, end // tokens_per_block):
            if self.pools[group].find(self._hash(request, group, block)) is None:
                return block * tokens_per_block
        return end

    def allocate(self, request: Request, num_local: int, num_known: int, num_tokens: int) -> bool:
        """Give a request without blocks its tables, or nothing at all.

        Args:
            request: It has no blocks.
            num_local: Tokens that `match` found; their blocks are shared.
            num_known: Tokens whose KV will be there before the request runs: these and loaded ones.
            num_tokens: Tokens that the tables have to hold.
        """
        request.tables = []
        for group, kv_group in enumerate(self._groups):
            first = self._first_needed(group, num_known) // kv_group.tokens_per_block
            num_shared = num_local // kv_group.tokens_per_block
            shared = [
                self._share(request, group, block) if block >= first else NULL_BLOCK
                for block in range(num_shared)
            ]
            request.tables.append(shared + [NULL_BLOCK] * (first - num_shared))
        request.num_published = [num_local // g.tokens_per_block for g in self._groups]
        if self.grow(request, num_tokens):
            return True
        self.release(request)
        return False

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Lengthen the tables to hold `num_tokens`; False, and nothing is taken, without room."""
        wanted = [
            -(-num_tokens // group.tokens_per_block) - len(table)
            for group, table in zip(self._groups, request.tables, strict=True)
        ]
        if any(n > pool.num_free for n, pool in zip(wanted, self.pools, strict=True)):
            return False
        for count, table, pool in zip(wanted, request.tables, self.pools, strict=True):
            table.extend(pool.take(max(0, count)))
        return True

    def publish(self, request: Request) -> None:
        """Let others find the full blocks whose KV is computed; give back what no window sees."""
        for group, kv_group in enumerate(self._groups):
            table, pool = request.tables[group], self.pools[group]
            num_full = request.num_computed_tokens // kv_group.tokens_per_block
            for block in range(request.num_published[group], num_full):
                if table[block] != NULL_BLOCK:
                    pool.publish(table[block], self._hash(request, group, block))
            request.num_published[group] = max(request.num_published[group], num_full)
            first = self._first_needed(group, request.num_computed_tokens)
            for block in range(first // kv_group.tokens_per_block - 1, -1, -1):
                if table[block] == NULL_BLOCK:
                    break
                pool.release([table[block]])
                table[block] = NULL_BLOCK

    def truncate(self, request: Request, num_tokens: int) -> bool:
        """Give back the blocks behind `num_tokens`, a multiple of every `tokens_per_block`.

        Returns:
            Whether the rest suffices to go on from there.
        """
        suffices = True
        for group, kv_group in enumerate(self._groups):
            num_kept = num_tokens // kv_group.tokens_per_block
            table = request.tables[group]
            self.pools[group].release(reversed(table[num_kept:]))
            del table[num_kept:]
            first = self._first_needed(group, num_tokens) // kv_group.tokens_per_block
            suffices &= NULL_BLOCK not in table[first:]
        return suffices

    def release(self, request: Request) -> None:
        """Give back all blocks; their content can be found until they are taken."""
        for table, pool in zip(request.tables, self.pools, strict=False):
            pool.release(reversed(table))
        request.tables, request.num_published = [], []

    def take_new(self) -> list[list[int]]:
        """Return the blocks handed out since the last call, for each group."""
        return [pool.take_new() for pool in self.pools]

    def _share(self, request: Request, group: int, block: int) -> int:
        found = self.pools[group].find(self._hash(request, group, block))
        assert found is not None, "match() found it in this step"
        self.pools[group].share(found)
        return found

    def _hash(self, request: Request, group: int, block: int) -> bytes:
        end = (block + 1) * self._groups[group].tokens_per_block
        return request.block_hashes[end // self._tokens_per_hash - 1]

    def _first_needed(self, group: int, num_tokens: int) -> int:
        """Return the first position that computing token `num_tokens` still reads."""
        window = self._groups[group].window
        return 0 if window is None else max(0, num_tokens - window + 1)
