"""Tile sizes of the linear kernel, by the shape of the weight and by nothing else: bits may not depend on rows.

The table is measured (`benchmarks/kernel_times.py` prints its lines); shapes that are not in it get a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS = 64  # fewer leave most of a large GPU idle
SMALL = 2048  # up to here every program can afford the statistics of its rows' norm itself


@dataclass(frozen=True)
class Tile:
    """How a product is cut.

    Attributes:
        m: rows of a tile; a multiple of 16.
        n: outputs of a tile.
        k: inputs of one step.
        warps: per program.
        stages: steps in flight.
        split: programs that share the inputs of a tile; the last of them to finish adds their parts, in one order.
    """

    m: int = 16
    n: int = 16
    k: int = 64
    warps: int = 4
    stages: int = 4
    split: int = 1


# (outputs of all weights of the launch, inputs): SmolLM2-135M's q,k,v; o; gate and up; down; head
TILES: dict[tuple[int, int], Tile] = {
    (960, 576): Tile(16, 16, 128, 2, 4),
    (576, 576): Tile(16, 16, 64, 2, 4),
    (3072, 576): Tile(16, 32, 64, 4, 4),  # one program computes 32 gates and their 32 ups
    (576, 1536): Tile(16, 16, 128, 2, 4, split=2),
    (49152, 576): Tile(16, 128, 64, 4, 4),
}


def tile(n: int, k: int) -> Tile:
    """The tile of a product.

    Args:
        n: outputs, of all weights of the launch together.
        k: inputs.
    """
    return TILES.get((n, k)) or guess(n, k)


def guess(n: int, k: int) -> Tile:
    """A tile for an unmeasured shape: few outputs want many small programs, many outputs large reads.

    Tall tiles read the weights once for up to 64 rows, which counts where reading them is what takes the time.
    """
    if n * k >= 1 << 23:
        return Tile(64, 64 if n >= 64 * PROGRAMS else 32, 64, 4, 4)
    width = 64
    while width > 16 and n < width * PROGRAMS:
        width //= 2
    return Tile(16, width, 64 if k % 128 else 128, 4, 4)
