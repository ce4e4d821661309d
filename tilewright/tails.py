"""Exact tails: tiles that divide, for devices on which a row out of range faults even where it is masked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace

from tilewright.errors import GenerationError
from tilewright.expr import Div, Expr, Size
from tilewright.kernel import Kernel
from tilewright.tensor import Tensor


def adapted(kernel: Kernel, lowering: Mapping[str, str]) -> Kernel:
    """`kernel` as a device with this lowering of `tail` runs it: under `exact` each tile divides what it cuts.

    A tile is then halved at launch until it divides, so there is no kernel with masks for tiles that do not.

    Raises:
        GenerationError: a tile of which no size is known that it cuts.
    """
    if lowering["tail"] != "exact":
        return kernel
    arranged = dict.fromkeys(tile for branch in kernel.branches for tile in branch.arranged)
    cut = {tile: _cut(kernel, tile) for tile in arranged}
    return replace(kernel, divides={tile: kernel.divides.get(tile) or sizes for tile, sizes in cut.items()})


def _cut(kernel: Kernel, tile: str) -> tuple[Size, ...]:
    """The sizes that `tile` cuts, which together make the number of its programs or of its steps."""
    sizes = {name: Size(name, "tile", low=1, high=1024) for name in kernel.tiles}
    found: dict[Size, None] = {}
    for branch in kernel.branches:
        if tile not in branch.arranged:
            continue
        flags = [p for p in inspect.signature(branch.arrange).parameters.values() if p.kind is p.KEYWORD_ONLY]
        arranged = branch.arrange(**{n: sizes[n].expr for n in branch.arranged}, **{p.name: p.default for p in flags})
        tensors = [value for value in arranged.values() if isinstance(value, Tensor)]
        steps = [axis for tensor in tensors for level in tensor.levels[1:-1] for axis in level]
        for axis in (*tensors[0].axes, *steps):
            count = axis.size.single
            if isinstance(count, Div) and count.den == sizes[tile].expr:
                found |= dict.fromkeys(_sizes(count.num - sizes[tile].expr + 1))
    if not found:
        raise GenerationError(f"{kernel.name}: nothing tells which sizes the tile {tile} must divide")
    return tuple(found)


def _sizes(size: Expr) -> list[Size]:
    return [atom for atom in size.atoms() if isinstance(atom, Size)]
