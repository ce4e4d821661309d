"""What an arrangement does, as text: grid, tiles, masks, bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.access import Places
from tilewright.expr import Atom, Expr, Size, render, top
from tilewright.kernel import Kernel
from tilewright.tensor import Tensor
from tilewright.vendors import VendorProfile

ITEM = {"float32": 4, "int64": 8, "int32": 4, "uint8": 1}  # bytes; every other dtype so far has 2


def explain(kernel: Kernel, profile: VendorProfile, config: Mapping[str, int]) -> str:
    """The programs of every branch under `config`: what they hold, move and mask.

    Args:
        config: the tile sizes and num_warps; where a tile of `Kernel.divides` does not divide its size, the masked
            kernel runs instead, with one more mask.
    """
    tiles = {name: config[name] for name in kernel.tiles}
    lines = [f"{kernel.name} on {profile.name}: " + ", ".join(f"{k} = {v}" for k, v in config.items())]
    for number, branch in enumerate(kernel.branches):
        text = kernel.branch(number, profile.lowering, tiles)
        arranged = branch.arrange(**{t: kernel.tile_size(t, tiles, True) for t in branch.arranged})
        tensors = {name: t for name, t in arranged.items() if isinstance(t, Tensor)}
        lines += ["", f"{branch.name}: {branch.application.__module__.removeprefix('tilewright.')}"]
        grid = next(iter(tensors.values())).axes
        lines.append("  grid      " + " x ".join(f"{a.name} {size_text(a.size)}" for a in grid))
        for axis in dict.fromkeys(axis for t in tensors.values() for level in t.levels[1:-1] for axis in level):
            lines.append(f"  steps     {axis.name} {size_text(axis.size)}")
        lanes = (profile.warp_size or 1) * config["num_warps"]
        places = Places(tensors, fold=True, recast=True, reserved=set())
        for name, tensor in tensors.items():
            lines.append(f"  {name:<8}  {_tile(tensor, places.moving(name), lanes)}")
        for mask in text.masks:
            lines.append(f"  mask      {mask.kind} {mask.parameter}: {' and '.join(mask.texts) or 'none'}")
    return "\n".join(lines) + "\n"


def _tile(tensor: Tensor, moving: Sequence[str], lanes: int) -> str:
    """Its axes along which elements differ: one element serves all positions of the others."""
    axes = [axis for axis in tensor.levels[-1] if axis.size == 1 or axis.name in moving]
    shape = ", ".join(f"{a.name} {size_text(a.size)}" for a in axes)
    count = 1
    for axis in axes:
        count *= axis.size.value or top(axis.size) or 1
    size = count * ITEM.get(tensor.source.dtype, 2)
    per_lane = f", {count / lanes:g} a lane" if lanes > 1 else ""
    return f"{tensor.name} [{shape}]: {count} elements, {size} bytes{per_lane}"


def size_text(size: Expr) -> str:
    """A size, with the tiles that the configuration binds as numbers."""

    def name(atom: Atom) -> str:
        return str(atom.low) if isinstance(atom, Size) and atom.low == atom.high else atom.label

    return render(size, name)
