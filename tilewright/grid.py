"""How the programs of a launch get their numbers: the lowerings `grid`, `branch` and `subtile`, as text.

`direct` launches all programs at once, `chunked` at most the device's limit at a time, with an offset, and
`persistent` as many as run at once, each of which strides over the numbers. Under `inner_loop` the tile of a program
may be larger than what the device holds on chip: a program then takes several numbers, one after the other.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.errors import GenerationError
from tilewright.expr import const, top
from tilewright.kernel import Branch, Kernel
from tilewright.tensor import Tensor
from tilewright.vendors import VendorProfile

LIVE = 3  # float32 copies of a tile that are live at once; measured for [64, 512] by FlagGems-vllm's Ascend override
# What runs programs at once, by the word of `resident_programs`: the properties of Triton's driver to multiply.
RESIDENT = {
    "sm": ("multiprocessor_count",),
    "cu": ("multiprocessor_count",),
    "vectorcore": ("num_vectorcore",),
    "aicore": ("num_aicore",),
    "cores": ("cluster_num", "core_num_per_cluster"),
}
INTERPRETED = 3  # programs of a persistent launch on the CPU: few, so that each takes several turns


@dataclass(frozen=True)
class Grid:
    """The launch form of a profile.

    Attributes:
        form: direct, chunked or persistent.
        parts: whether a program works through its tile in parts.
        separate: whether programs of each kind have a kernel of their own.
        limit: programs of one launch.
        budget: bytes that the tiles of a program may take at once; None if nothing limits them here.
        resident: the driver's properties that say how many programs run at once.
    """

    form: str
    parts: bool
    separate: bool
    limit: int
    budget: int | None
    resident: tuple[str, ...]

    @classmethod
    def of(cls, profile: VendorProfile) -> Grid:
        form, loops = profile.lowering["grid"], profile.lowering["subtile"] == "inner_loop"
        scratch = profile.scratch_bytes
        return cls(
            form=form,
            parts=loops and form != "persistent",
            separate=profile.lowering["branch"] == "separate",
            limit=(profile.grid_limit or (65535, 1, 1))[0],
            budget=scratch // profile.scratch_multibuffer // LIVE if loops and scratch else None,
            resident=RESIDENT.get(profile.resident_programs or "", ()),
        )

    @property
    def parameters(self) -> tuple[str, ...]:
        """The integers of a launch that the kernel takes."""
        if self.form == "persistent":
            return ("programs",)
        return (*(["first_program"] if self.form == "chunked" else []), *(["parts", "programs"] if self.parts else []))

    @property
    def indent(self) -> str:
        """What the lines after `head` have more than a kernel's own."""
        return "    " if self.parts or self.form == "persistent" else ""

    def head(self) -> list[str]:
        """The lines of a kernel that give `pid`."""
        first = "tl.program_id(0)" + (" + first_program" if self.form == "chunked" else "")
        if self.form == "persistent":
            return ["    for pid in range(tl.program_id(0), programs, tl.num_programs(0)):"]
        if self.parts:
            first = f"({first})" if " " in first else first
            return [
                f"    first_part = {first} * parts",
                "    for pid in range(first_part, tl.minimum(first_part + parts, programs)):",
            ]
        return [f"    pid = {first}"]

    def launch(
        self, kernel: str, runtime: Sequence[str], keywords: Sequence[str], device: str, parts: str
    ) -> list[str]:
        """The lines that launch `programs` programs of `kernel`."""
        tail = ", ".join([*runtime, *self.parameters, *keywords])
        if self.form == "persistent":
            return [f"    kernel_grid = (min(programs, _resident_programs({device}), {self.limit}),)",
                    f"    {kernel}[kernel_grid]({tail})"]  # fmt: skip
        total = "programs"
        lines = []
        if self.parts:
            lines = [f"    parts = {parts}", "    groups = triton.cdiv(programs, parts)"]
            total = "groups"
        if self.form == "direct":
            return [*lines, f"    {kernel}[({total},)]({tail})"]
        return [
            *lines,
            f"    for first_program in range(0, {total}, {self.limit}):",
            f"        count = min({self.limit}, {total} - first_program)",
            f"        {kernel}[(count,)]({tail})",
        ]

    def helpers(self) -> list[str]:
        """Host functions of the module that the launch calls."""
        found = []
        if self.form == "persistent":
            found.append(_RESIDENT.format(
                interpreted=INTERPRETED,
                names=", ".join(f'"{name}"' for name in self.resident) + ("," if len(self.resident) == 1 else ""),
            ))  # fmt: skip
        if self.budget is not None:
            found.append(_IN_PARTS)
        return found


_RESIDENT = '''_resident = {{}}


def _resident_programs(device):
    """How many programs run at once: as many as the device has cores, or multiprocessors where it has no such."""
    if device.type == "cpu":
        return {interpreted}  # interpreted: few, so that each takes several turns
    if device not in _resident:
        properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
        count = 1
        for name in ({names}):
            count *= properties.get(name, 1)
        _resident[device] = count if count > 1 else properties["multiprocessor_count"]
    return _resident[device]

'''

_IN_PARTS = '''def _in_parts(limit, *tiles):
    """How many parts of at most `limit` positions a program's tile makes, then the sizes of one."""
    count, parts, sizes = 1, 1, []
    for size in tiles:
        count *= size
    for size in tiles:
        while size > 1 and count > limit:
            size, count, parts = size // 2, count // 2, parts * 2
        sizes.append(size)
    return (parts, *sizes)

'''


def part_limit(kernel: Kernel, branch: Branch, budget: int) -> int:
    """The positions along the tiles of `branch` whose elements, in float32, `budget` bytes hold; at least 1."""
    flags = [p for p in inspect.signature(branch.arrange).parameters.values() if p.kind is p.KEYWORD_ONLY]
    arranged = branch.arrange(**{tile: const(1) for tile in branch.arranged}, **{p.name: p.default for p in flags})
    largest = 1
    for tensor in arranged.values():
        if isinstance(tensor, Tensor):
            sizes = [top(axis.size) for axis in tensor.levels[-1]]
            if None in sizes:
                raise GenerationError(f"{kernel.name}: the tile of {tensor.name} has no largest size")
            largest = max(largest, math.prod(1 << (size - 1).bit_length() for size in sizes if size))
    return max(1, budget // (4 * largest))
