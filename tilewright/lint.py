"""A generated text, checked against the profile of its device: what the device lacks or cannot hold is not in it.

Every rule reads the text alone, so that a module changed by hand is judged too. A violation names the rule, the line
and the fact of the profile, with how that is known.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.grid import LIVE
from tilewright.shapes import Tiles, dotted, elements
from tilewright.vendors import VendorProfile
from tilewright.vendors.lowering import LOWERING

UNBOUNDED = 2**31 - 1  # programs that a launch may have where its text bounds nothing
WORDS = {  # by capability, what a text says to use it
    "cast.e4m3": ("tl.float8e4nv",),
    "dtype.bf16": ("tl.bfloat16",),
    "dtype.fp64": ("tl.float64",),
    "dtype.i64": ("tl.int64",),
    "op.div_rn": ("tl.div_rn", "tl.math.div_rn"),
    "op.gather": ("tl.gather",),
    "op.inline_asm": ("tl.inline_asm_elementwise",),
    "op.min": ("tl.min",),
    "op.pow": ("tl.math.pow", "libdevice.pow"),
    "op.sort": ("tl.sort",),
}
LOAD_OPTIONS = ("cache_modifier", "eviction_policy", "volatile", "padding_option")


@dataclass(frozen=True)
class Violation:
    """One thing a device cannot do.

    Attributes:
        rule: word, form, dot, on-chip, grid or warps.
        line: of the text.
        problem: what stands there.
        fact: the field of the profile that it breaks, and how that is known.
    """

    rule: str
    line: int
    problem: str
    fact: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.rule}: {self.problem} [{self.fact}]"


def lint(text: str, profile: VendorProfile) -> list[Violation]:
    """What in a module's text the device of `profile` cannot compile, launch or hold, in the order of the lines."""
    found = set(_Module(ast.parse(text), profile).violations())
    return sorted(found, key=lambda violation: (violation.line, violation.rule, violation.problem))


class _Module:
    def __init__(self, tree: ast.Module, profile: VendorProfile) -> None:
        self.profile = profile
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.device = {f.name: f for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)}
        self.host = [f for f in functions if f.name not in self.device]
        self.tables = {
            node.targets[0].id: node
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }

    def violations(self) -> Iterator[Violation]:
        for function in self.device.values():
            yield from self._words(function)
            yield from self._forms(function)
        configs = list(self._configs())
        for line, config in configs:
            yield from self._warps(line, config)
        for held in {tuple(sorted(self._held(config).items())) for _, config in configs} or {()}:
            yield from self._tiles(dict(held))
        for function in self.host:
            yield from self._grids(function)

    def _fact(self, label: str) -> str:
        """`grid_limit = 65535, 1, 1: stated, triton-ascend: coreDim`."""
        name, _, key = label.partition(".")
        value = getattr(self.profile, name)
        shown = value.get(key) if key else ", ".join(map(str, value)) if isinstance(value, tuple) else value
        default = LOWERING[key].why if name == "lowering" else "not stated"
        how, source = self.profile.provenance.get(label, ("default", default))
        return f"{label} = {shown}: {how}, {source}"

    # -- words
    def _words(self, function: ast.FunctionDef) -> Iterator[Violation]:
        lacking = {
            word: capability
            for capability, words in WORDS.items()
            if self.profile.support.get(capability) == "unsupported"
            for word in words
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                word = dotted(node)
                if word in lacking:
                    yield Violation("word", node.lineno, word, self._fact(f"support.{lacking[word]}"))
                if word.split(".")[0] == "libdevice":
                    problem = f"{word}: words of tl alone are the same everywhere"
                    yield Violation("word", node.lineno, problem, self._fact("libdevice"))
            if isinstance(node, ast.Call) and self.profile.support.get("op.load_options") == "unsupported":
                for keyword in node.keywords:
                    if keyword.arg in LOAD_OPTIONS:
                        yield Violation("word", node.lineno, keyword.arg, self._fact("support.op.load_options"))

    # -- forms
    def _forms(self, function: ast.FunctionDef) -> Iterator[Violation]:
        lowering, constants = self.profile.lowering, _constants(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = dotted(node.func)
                if called == "tl.pointer_type" and lowering["ptr_recast"] == "wrapper_view":
                    problem = "a pointer's element type is cast"
                    yield Violation("form", node.lineno, problem, self._fact("lowering.ptr_recast"))
                if called == "tl.reshape" and lowering["pair"] == "pair_address" and _ends_in_pairs(node):
                    yield Violation("form", node.lineno, "pairs made by a reshape", self._fact("lowering.pair"))
            if isinstance(node, ast.Attribute) and dotted(node) == "tl.int64" and lowering["index_width"] == "i32":
                yield Violation("form", node.lineno, "an index of 64 bits", self._fact("lowering.index_width"))
            if isinstance(node, ast.If):
                yield from self._arms(node, constants)
        if "_kernel_masked" in function.name and lowering["tail"] == "exact":
            problem = "a kernel for tiles that do not divide"
            yield Violation("form", function.lineno, problem, self._fact("lowering.tail"))

    def _arms(self, node: ast.If, constants: set[str]) -> Iterator[Violation]:
        """The arms of an if that the device decides; one that the compiler decides has one arm in the end."""
        if {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)} <= constants:
            return
        fact = self._fact("lowering.branch")
        for statement in (*node.body, *node.orelse):
            for inner in ast.walk(statement):
                line = getattr(inner, "lineno", node.lineno)
                if isinstance(inner, ast.Return):
                    yield Violation("form", line, "an early return", fact)
                if self.profile.lowering["branch"] != "separate":
                    continue
                if isinstance(inner, ast.For | ast.While):
                    yield Violation("form", line, "a loop in an arm of an if", fact)
                if isinstance(inner, ast.Call) and dotted(inner.func) in self.device:
                    yield Violation("form", line, f"{dotted(inner.func)} is called in an arm of an if", fact)

    # -- configurations
    def _configs(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each configuration that a module may launch with, and its line."""
        for name in ("RULES", "FORCED"):
            if name in self.tables:
                for node in ast.walk(self.tables[name].value):
                    if isinstance(node, ast.Dict) and "num_warps" in (config := _literal(node)):
                        yield node.lineno, config

    def _held(self, config: Mapping[str, Any]) -> dict[str, int]:
        """The tile sizes that a kernel is compiled with: a program may take its tile in parts."""
        held = {name: size for name, size in config.items() if type(size) is int}
        for function in self.host:
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and dotted(node.func) == "_in_parts":
                    limit, *tiles = map(ast.unparse, node.args)
                    count = 1
                    for tile in tiles:
                        count *= held.get(tile, 1)
                    for tile in tiles:
                        while held.get(tile, 1) > 1 and count > int(limit):
                            held[tile], count = held[tile] // 2, count // 2
        return held

    def _warps(self, line: int, config: Mapping[str, Any]) -> Iterator[Violation]:
        profile, warps, stages = self.profile, config["num_warps"], config.get("num_stages", 1)
        if profile.num_warps and warps not in profile.num_warps:
            yield Violation("warps", line, f"num_warps = {warps}", self._fact("num_warps"))
        if profile.num_stages and stages not in profile.num_stages:
            yield Violation("warps", line, f"num_stages = {stages}", self._fact("num_stages"))
        threads = warps * (profile.warp_size or 1)
        if profile.max_threads and threads > profile.max_threads:
            problem = f"num_warps = {warps} are {threads} threads"
            yield Violation("warps", line, problem, self._fact("max_threads"))

    # -- tiles
    def _tiles(self, config: Mapping[str, int]) -> Iterator[Violation]:
        profile = self.profile
        room = profile.scratch_bytes // profile.scratch_multibuffer if profile.scratch_bytes else None
        for function in self.device.values():
            tiles = Tiles(config)
            statements = [s for s in ast.walk(function) if isinstance(s, ast.Assign | ast.Expr)]
            for statement in sorted(statements, key=lambda s: s.lineno):
                tiles.visit(statement)
            for call, left, right in tiles.dots:
                yield from self._dot(call, left, right)
                size = [elements(left), elements(right)]
                if room and profile.warp_size and None not in size:
                    taken = sum(filter(None, size)) * 2 * config.get("num_stages", 1)
                    if taken > room:
                        problem = f"operands of {taken} bytes over {config.get('num_stages', 1)} stages"
                        yield Violation("on-chip", call.lineno, problem, self._fact("scratch_bytes"))
            for made in tiles.made:
                count = elements(made.shape)
                if room is None or count is None:
                    continue
                # Without warps there are no registers: copies of a tile live on chip. With them a reshaped one does.
                copies = LIVE if profile.warp_size is None else 1
                reshaped = isinstance(made.node, ast.Call) and dotted(made.node.func) == "tl.reshape"
                through = profile.warp_size is None or reshaped
                if through and self._is_device(profile) and count * 4 * copies > room:
                    shape = " x ".join(map(str, made.shape))
                    problem = f"a tile of {shape} takes {count * 4 * copies} bytes, {room} are there"
                    yield Violation("on-chip", made.node.lineno, problem, self._fact("scratch_bytes"))

    @staticmethod
    def _is_device(profile: VendorProfile) -> bool:
        """generic has no warps because it is no device, not because it has none."""
        return profile.warp_size is not None or "warp_size" in profile.provenance

    def _dot(self, call: ast.Call, left: Any, right: Any) -> Iterator[Violation]:
        if self.profile.lowering["dot"] == "none":
            yield Violation("dot", call.lineno, "tl.dot", self._fact("lowering.dot"))
        if self.profile.min_dot is None:
            return
        given = (left[-2] if len(left) > 1 else None, right[-1], left[-1])
        small = [f"{n} = {g}" for n, g, least in zip("MNK", given, self.profile.min_dot, strict=True)
                 if g is not None and g < least]  # fmt: skip
        if small:
            yield Violation("dot", call.lineno, f"tl.dot with {', '.join(small)}", self._fact("min_dot"))

    # -- launches
    def _grids(self, function: ast.FunctionDef) -> Iterator[Violation]:
        limits = self.profile.grid_limit
        if limits is None:
            return
        bounds = {
            node.targets[0].id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
                continue
            grid = node.func.slice
            grid = bounds.get(grid.id, grid) if isinstance(grid, ast.Name) else grid
            sizes = grid.elts if isinstance(grid, ast.Tuple) else [grid]
            for size, limit, axis in zip(sizes, limits, "xyz", strict=False):
                most = _at_most(size, bounds)
                if most > limit:
                    count = "any number of" if most == UNBOUNDED else str(most)
                    problem = f"a launch of {count} programs along {axis}"
                    yield Violation("grid", node.lineno, problem, self._fact("grid_limit"))


def _at_most(size: ast.expr, bounds: Mapping[str, ast.expr]) -> int:
    if isinstance(size, ast.Constant) and type(size.value) is int:
        return size.value
    if isinstance(size, ast.Name) and size.id in bounds and bounds[size.id] is not size:
        inner = {name: value for name, value in bounds.items() if name != size.id}
        return _at_most(bounds[size.id], inner)
    if isinstance(size, ast.Call) and dotted(size.func) == "min":
        return min(_at_most(argument, bounds) for argument in size.args)
    return UNBOUNDED


def _constants(function: ast.FunctionDef) -> set[str]:
    return {a.arg for a in function.args.args if a.annotation and ast.unparse(a.annotation) == "tl.constexpr"}


def _ends_in_pairs(node: ast.Call) -> bool:
    shape = node.args[1] if len(node.args) > 1 else None
    last = shape.elts[-1] if isinstance(shape, ast.Tuple) and shape.elts else None
    return isinstance(last, ast.Constant) and last.value == 2


def _literal(node: ast.Dict) -> dict[str, Any]:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
