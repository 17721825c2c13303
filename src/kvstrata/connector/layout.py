"""Where the blocks are in an engine's tensors: described by the engine, never guessed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one layer's tensor holds the blocks of its group.

    Attributes:
        num_blocks: Blocks in the tensor, as the block tables count them.
        block_axis: The axis that counts blocks. Its length is `num_blocks`, or a multiple of it
            where the kernel's blocks are smaller: then each block is that many neighbours.
    """

    num_blocks: int
    block_axis: int
