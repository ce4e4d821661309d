"""The text of a standalone module: kernels, rules, checks and the public function of one operator on one device."""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.errors import GenerationError
from tilewright.expr import INT32, Expr, Size, render
from tilewright.grid import Grid, part_limit
from tilewright.kernel import INDEX_TYPE, Argument, Branch, BranchText, Flag, Kernel, Scalar
from tilewright.language import HELPERS
from tilewright.layout import wrapped
from tilewright.rules import Rules
from tilewright.tails import adapted
from tilewright.vendors import VendorProfile

# Names of a module's text, in functions that hold the operator's own names too.
RESERVED = frozenset(
    "config thresholds rule kernel programs count first_program device fits pid tl torch triton last_launch"
    " num_warps num_stages problems tensors kinds error lines quantities wanted"
    " parts first_part groups kernel_grid index_type narrow".split()
)
UNUSED = ("input",)  # builtins that no module's text calls: arguments may have these names

WITHIN_INT32 = '''def _within_int32(*tensors):
    """Do 32 bits hold the offset of every element?"""
    return all(
        sum(n * abs(stride) for n, stride in zip(tensor.shape, tensor.stride())) < 2**31
        for tensor in tensors
        if tensor is not None
    )

'''

ERRORS = '''class ContractError(ValueError):
    """A call breaks the operator's contract in several ways; the message lists all of them."""


class ShapeError(ContractError):
    """Every problem of the call is one of sizes."""


class DtypeError(ContractError):
    """Every problem of the call is one of dtypes."""


class LayoutError(ContractError):
    """Every problem of the call is one of strides or contiguity."""


class DeviceError(ContractError):
    """Every problem of the call is one of devices."""
'''


def module_text(kernel: Kernel, public: Callable[..., Any], profile: VendorProfile, rules: Rules) -> str:
    """Text of the module of `kernel` for a device; imports torch and triton only; the same bytes for the same input."""
    return wrapped("\n".join(_Module(adapted(kernel, profile.lowering), public, profile, rules).parts()))


def fake_text(kernel: Kernel, public: Callable[..., Any], profile: VendorProfile, rules: Rules) -> str:
    """Text of the same public function that makes the same checks and the same outputs, and launches nothing."""
    return wrapped("\n".join(_Module(adapted(kernel, profile.lowering), public, profile, rules).fake()))


@dataclass(frozen=True)
class Programs:
    """The programs of a branch: a device function for each combination of its flags' values."""

    branch: Branch
    texts: Mapping[tuple[Any, ...], BranchText]

    @property
    def first(self) -> BranchText:
        return next(iter(self.texts.values()))


@dataclass(frozen=True)
class Variant:
    """One kernel of a module: its branches where the tiles of `divides` divide (`exact`), or do not."""

    name: str
    exact: bool
    branches: tuple[Programs, ...]

    @property
    def texts(self) -> list[BranchText]:
        return [text for programs in self.branches for text in programs.texts.values()]


class _Module:
    def __init__(self, kernel: Kernel, public: Callable[..., Any], profile: VendorProfile, rules: Rules):
        self.kernel, self.public, self.profile, self.rules = kernel, public, profile, rules
        configs = [*(rule.config for rule in rules.rules), *(kernel.forces[1].values() if kernel.forces else ())]
        self.fixed = {t: configs[0][t] for t in kernel.tiles if len({c[t] for c in configs}) == 1}
        self.refits: dict[str, str | None] = {t: o for t, o in kernel.refits.items() if self.fixed.get(t) != 1}
        for tile in (*kernel.refits, *kernel.refits.values()) if self.refits else ():
            self.fixed.pop(tile, None)
        self.grid, self.exact = Grid.of(profile), profile.lowering["tail"] == "exact"
        if self.exact or self.grid.budget is not None:  # these tiles shrink at launch
            self.fixed = {tile: size for tile, size in self.fixed.items() if size == 1}
        if self.exact:
            self.refits |= {tile: None for tile in kernel.divides if tile not in {*self.refits, *self.fixed}}
        self._refuse_names()
        self._texts: dict[tuple[Any, ...], BranchText] = {}
        self.variants = list(self._variants())
        first = self.variants[0].texts
        self.tensor_names = [a.name for a in kernel.tensors]
        self.sizes: dict[str, Size] = {}
        for variant in self.variants:
            for text in variant.texts:
                self.sizes.update(text.sizes)
        pointers = dict.fromkeys(p for text in first for p in text.pointers)
        own = [*self.tensor_names, *(output.name for output in kernel.outputs)]
        self.views = {p: text.pointers[p] for text in first for p in text.pointers if p not in own}
        self.pointers = [n for n in own if n in pointers] + list(self.views)
        self.scalars = list(dict.fromkeys(s for text in first for s in text.scalars))
        asked = {n for branch in kernel.branches for n in (*branch.flags, branch.when)}
        self.flags = [n for n in kernel.all_flags if n in asked]
        self.runtime = [n for n, s in self.sizes.items() if s.kind == "runtime"]
        self.constexprs = [n for n, s in self.sizes.items() if s.kind == "constexpr"]
        self.tiles = [t for t in kernel.tiles if t not in self.fixed]
        self.host = self._host_sizes()

    def _refuse_names(self) -> None:
        """Names of the operator's own that the module's text has for something else."""
        kernel = self.kernel
        own = [a.name for a in (*kernel.arguments, *kernel.outputs)]
        own += [*kernel.tiles, *(branch.name for branch in kernel.branches)]
        scalars = {a.size.name: a.name for a in kernel.arguments if isinstance(a, Scalar) and a.size}
        sizes = {
            atom.name
            for argument in kernel.tensors
            for e in (*argument.tensor.shape, *argument.tensor.source.strides)
            for atom in e.atoms()
            if isinstance(atom, Size)
        }
        own += [size for size in (*sizes, *kernel.derived) if size not in scalars]
        taken = {n for n in own if n in RESERVED or keyword.iskeyword(n) or hasattr(builtins, n) and n not in UNUSED}
        taken |= {n for n in own if n == kernel.name or n.startswith(f"{kernel.name}_kernel")}
        names = [a.name for a in kernel.arguments]
        taken |= {n for n in own if n in names and own.count(n) > 1}
        if taken:
            raise GenerationError(f"{kernel.name}: the module needs these names for itself: {', '.join(sorted(taken))}")

    def _variants(self) -> Iterator[Variant]:
        kernel = self.kernel
        needs_two = [t for t in kernel.divides if self.fixed.get(t) != 1]
        for exact in (True, False) if needs_two and not self.exact else (True,):
            branches = tuple(self._programs(i, exact) for i in range(len(kernel.branches)))
            yield Variant(f"{kernel.name}_kernel" + ("" if exact else "_masked"), exact, branches)

    def _programs(self, number: int, exact: bool) -> Programs:
        branch, known = self.kernel.branches[number], self.kernel.all_flags
        exact = exact or not set(branch.tiles) & set(self.kernel.divides)
        texts = {
            values: self._text(number, exact, values)
            for values in itertools.product(*(known[name].values for name in branch.flags))
        }
        grids = {text.grid for text in texts.values()}
        if len(grids) > 1:
            raise GenerationError(
                f"{branch.name}: its flags change the number of programs: {' or '.join(sorted(map(str, grids)))}"
            )
        return Programs(branch, texts)

    def _text(self, number: int, exact: bool, values: tuple[Any, ...]) -> BranchText:
        key = (number, exact, values)
        if key not in self._texts:
            flags = dict(zip(self.kernel.branches[number].flags, values, strict=True))
            self._texts[key] = self.kernel.branch(number, self.profile.lowering, self.fixed, exact, flags)
        return self._texts[key]

    # -- parts
    def parts(self) -> Iterator[str]:
        yield self._header()
        yield "import torch\nimport triton\nimport triton.language as tl\n\n"
        helpers = dict.fromkeys(h for v in self.variants for text in v.texts for h in text.helpers)
        for name in helpers:
            yield HELPERS[name] + "\n"
        yield from self._functions()
        yield self._rules()
        yield ERRORS + "\n"
        yield self._refusal()
        yield self._choose()
        yield from map(self._refit, self.refits)
        yield from self._check_slots()
        yield from self.grid.helpers()
        if self.index_type:
            yield WITHIN_INT32
        yield self._public()
        yield self._launch()

    def fake(self) -> Iterator[str]:
        yield "import torch\n\n"
        yield ERRORS + "\n"
        yield self._refusal()
        parameters = [str(p.replace(annotation=inspect.Parameter.empty)) for p in self._parameters()]
        yield "\n".join([
            f"def {self.kernel.name}({', '.join(parameters)}):",
            *self._checked(),
            f"    device = {self.tensor_names[0]}.device",
            *self._outputs(),
            *self._returned(),
        ]) + "\n"

    def _header(self) -> str:
        kernel, profile = self.kernel, self.profile
        lowering = ", ".join(f"{k}={v}" for k, v in sorted(profile.lowering.items()))
        facts = [
            f"{t} divides {' and '.join(s.name for s in sizes)}, or the masked kernel runs"
            for t, sizes in kernel.divides.items()
        ]
        fixed = [f"{t} = {n}" for t, n in self.fixed.items()]
        lines = [
            f"{kernel.name} for {profile.name}",
            "Generated by Tilewright from an arrangement, an application and a profile; change those, not this file.",
            "",
            f"profile       {profile.name} {profile.hash}",
            f"applications  {kernel.application_hash()}",
            f"lowerings     {lowering}",
            f"tile sizes    {', '.join([*fixed, *(f'{t}: a parameter' for t in self.tiles)])}",
            *([f"relies on     {'; '.join(facts)}"] if len(self.variants) > 1 else []),
            *([f"relies on     tiles that divide: {', '.join(self.refits)} shrink until they do"]
              if self.exact and self.refits else []),
            f"status        {self.rules.status}",
        ]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines) + f'"""{self._doc_line()}"""\n'

    def _doc_line(self) -> str:
        return (inspect.getdoc(self.public) or self.kernel.name).splitlines()[0]

    def _functions(self) -> Iterator[str]:
        """Device functions, those that the masked variant shares once, then the kernels."""
        texts: dict[str, str] = {}
        for variant in self.variants:
            for text in variant.texts:
                if texts.get(text.name) == text.source:
                    continue
                name = text.name if text.name not in texts else f"{text.name}_masked"
                texts[name] = text.source
                yield text.source.replace(f"def {text.name}(", f"def {name}(", 1) + "\n"
        for variant in self.variants:
            for group in self.groups:
                name = self._kernel_name(variant, group)
                if name.startswith(variant.name):
                    yield self._kernel(name, [variant.branches[i] for i in group], texts) + "\n"

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The branches that share a launch, by their numbers."""
        numbers = range(len(self.kernel.branches))
        return [(i,) for i in numbers] if self.grid.separate else [tuple(numbers)]

    def _kernel_name(self, variant: Variant, group: tuple[int, ...]) -> str:
        """The kernel of a group; one that needs no masks is that of the exact variant."""
        if len(group) == len(variant.branches):
            return variant.name
        first = self.variants[0]
        same = all(variant.branches[i].texts == first.branches[i].texts for i in group)
        return f"{first.name if same else variant.name}_{variant.branches[group[0]].branch.name}"

    def _taken(self, branches: Sequence[Programs]) -> tuple[list[str], list[str]]:
        """The run-time parameters and the constants of a kernel of these branches."""
        runtime, constants = [*self.pointers, *self.scalars, *self.runtime], [*self.constexprs, *self.tiles]
        if len(branches) < len(self.kernel.branches):
            texts = [text for programs in branches for text in programs.texts.values()]
            taken = {name for text in texts for name in text.parameters}
            runtime, constants = ([n for n in names if n in taken] for names in (runtime, constants))
        asked = {n for programs in branches for n in programs.branch.flags}
        if not self.grid.separate:
            asked |= {programs.branch.when for programs in branches}
        return runtime, [*constants, *(n for n in self.flags if n in asked), *self.index_type]

    @property
    def index_type(self) -> list[str]:
        texts = [text for variant in self.variants for text in variant.texts]
        return [INDEX_TYPE] if any(INDEX_TYPE in text.parameters for text in texts) else []

    def _kernel(self, name: str, branches: Sequence[Programs], texts: Mapping[str, str]) -> str:
        runtime, constants = self._taken(branches)
        launch = self.grid.parameters
        constexprs = [f"{n}: tl.constexpr" for n in constants]
        plain = [n for n in (*self.runtime, *launch) if "stride" not in n and n in (*runtime, *launch)]
        lines = [
            "@triton.jit(do_not_specialize=[" + ", ".join(f'"{n}"' for n in plain) + "])",
            f"def {name}({', '.join([*runtime, *launch, *constexprs])}):",
            *self.grid.head(),
        ]
        indent = "    " + self.grid.indent
        start, heads = "", len(lines) - bool(self.grid.indent)  # before a loop over programs
        for number, programs in enumerate(branches):
            branch, last = programs.branch, number == len(branches) - 1
            calls = self._calls(programs, branch.flags, (), f"pid - {start}" if start else "pid", texts)
            if branch.when and not self.grid.separate:
                calls = [f"if {branch.when}:", *("    " + line for line in calls)]
            if last:
                if start:
                    lines.append(f"{indent}else:")
                lines += [indent + ("    " if start else "") + line for line in calls]
                continue
            count = f"{branch.name}_programs"
            before = f"{start} + " if start else ""
            own = self._when(branch, self._count(programs.first.grid))
            lines.insert(heads + number, f"    {count} = {before}{own}")
            lines.append(f"{indent}{'if' if not start else 'elif'} pid < {count}:")
            lines += [f"{indent}    {line}" for line in calls]
            start = count
        return "\n".join(lines) + "\n"

    def _calls(
        self, programs: Programs, flags: Sequence[str], chosen: tuple[Any, ...], pid: str, texts: Mapping[str, str]
    ) -> list[str]:
        """The call of a branch's device function, under tests of the flags that are not chosen yet."""
        if not flags:
            text = programs.texts[chosen]
            name = text.name if texts[text.name] == text.source else f"{text.name}_masked"
            return [f"{name}({', '.join([pid, *text.parameters[1:]])})"]
        flag = self.kernel.all_flags[flags[0]]
        arms = [(v, self._calls(programs, flags[1:], (*chosen, v), pid, texts)) for v in flag.values]
        if isinstance(flag.values[0], bool):
            arms.sort(key=lambda arm: not arm[0])
        lines: list[str] = []
        for i, (value, calls) in enumerate(arms):
            test = flag.name if isinstance(value, bool) else f'{flag.name} == "{value}"'
            last = i == len(arms) - 1
            lines.append("else:" if last and i else f"{'el' if i else ''}if {test}:")
            lines += ["    " + line for line in calls]
        return lines

    def _when(self, branch: Branch, count: str) -> str:
        """Text of a branch's number of programs: none without the flag it runs under."""
        return f"({count} if {branch.when} else 0)" if branch.when else count

    def _rules(self) -> str:
        lines = [
            "# Least quantities and configuration; the first rule whose quantities are all reached counts.",
            "RULES = (",
        ]
        for rule in self.rules.rules:
            lines.append(f"    # {rule.how}: {rule.source}")
            lines.append(f"    ({dict(rule.least)!r}, {dict(rule.config)!r}),")
        lowering = {k: v for k, v in sorted(self.profile.lowering.items())}
        lines += [
            ")", f"PROFILE = {self.profile.name!r}", f"LOWERINGS = {lowering!r}", f"FIXED = {self.fixed!r}",
            *([f"FORCED = {dict(self.kernel.forces[1])!r}"] if self.kernel.forces else []),
            "last_launch = None  # (rule or None, configuration, kernel, flags) of the last call that launched",
            *(["CHECK_SLOTS = False  # True: each call checks its slots first, which waits for the device"]
              if self.kernel.slots else []), "", "",
        ]  # fmt: skip
        return "\n".join(line if line.lstrip().startswith("#") else line.replace("'", '"') for line in lines)

    # -- checks
    @property
    def e4m3(self) -> str:
        """torch's name of the device's float8 format."""
        return f"float8_e4m3{self.profile.lowering['e4m3_format']}"

    def _optional(self, holds: str) -> list[str]:
        """The optional arguments that a check asks about without asking whether they are there."""
        optional = [a.name for a in self.kernel.tensors if a.optional]
        return [] if "None" in holds else _names(holds, optional)

    def _checks(self) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
        """(error, condition, message, arguments whose rank must be right): in the order of a careful reader."""
        device = self.tensor_names[0]
        seen: dict[str, str] = {}
        for argument in self.kernel.arguments:
            if isinstance(argument, Flag) and not isinstance(argument.values[0], bool):
                options = f"{', '.join(argument.values[:-1])} or {argument.values[-1]}"
                message = f"{argument.name} is {{{argument.name}!r}}, {options} is needed"
                yield "ContractError", _type_test(argument), message, ()
                continue
            if isinstance(argument, Flag):
                yield (
                    "DtypeError", _type_test(argument),
                    f"{argument.name} is of type {{type({argument.name}).__name__}}, a bool is needed", (),
                )  # fmt: skip
                continue
            if isinstance(argument, Scalar):
                word = "an int" if argument.is_integer else "a number"
                if argument.size:
                    seen[argument.size.name] = argument.name
                yield (
                    "DtypeError", _type_test(argument),
                    f"{argument.name} is of type {{type({argument.name}).__name__}}, {word} is needed", (),
                )  # fmt: skip
                continue
            yield from self._tensor_checks(argument, device, seen)
        for requirement in self.kernel.requirements:
            yield requirement.kind, requirement.holds, requirement.message, requirement.needs

    def _tensor_checks(
        self, argument: Argument, device: str, seen: dict[str, str]
    ) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
        name, axes, needs = argument.name, argument.tensor.axes, (argument.name,)
        expected = f"[{', '.join(str(a.name) for a in axes)}]"
        if argument.least_rank is not None:
            rank = f"{name}.dim() >= {argument.least_rank}"
            yield "ShapeError", rank, f"{name} has rank {{{name}.dim()}}, at least {argument.least_rank} is needed", ()
        else:
            yield (
                "ShapeError", f"{name}.dim() == {len(axes)}",
                f"{name} has rank {{{name}.dim()}}, {len(axes)} is needed: {expected}", (),
            )  # fmt: skip
            for i, axis in enumerate(axes):
                at = f"{name}.shape[{i}]"
                if axis.size.value is not None:
                    yield (
                        "ShapeError", f"{at} == {axis.size.value}",
                        f"{name} has {axis.name}={{{at}}}, {axis.size.value} is needed", needs,
                    )  # fmt: skip
                    continue
                size = axis.size.single
                assert isinstance(size, Size)
                if size.name in seen:
                    other = seen[size.name]
                    owner, verb = other.split(".")[0], "has" if "." in other else "is"
                    yield (
                        "ShapeError", f"{at} == {other}",
                        f"{name} has {axis.name}={{{at}}}, {owner} {verb} {{{other}}}", (name, owner),
                    )  # fmt: skip
                    continue
                seen[size.name] = at
                if size.low > 0:
                    few = f"{name} has {axis.name}={{{at}}}, at least {size.low} is needed"
                    yield "ShapeError", f"{at} >= {size.low}", few, needs
                high = size.high if isinstance(size.high, int) else size.high.value
                if high is not None and high < INT32:
                    many = f"{name} has {axis.name}={{{at}}}, at most {high} is supported"
                    yield "ShapeError", f"{at} <= {high}", many, needs
        dtypes = [self.e4m3 if dtype == "e4m3" else dtype for dtype in argument.dtypes]
        if dtypes[0].startswith("like:"):
            other = dtypes[0].removeprefix("like:")
            yield (
                "DtypeError", f"{name}.dtype == {other}.dtype",
                f"{name} is {{_name({name}.dtype)}}, {other} is {{_name({other}.dtype)}}: they must agree", (),
            )  # fmt: skip
        elif len(dtypes) == 1:
            yield (
                "DtypeError", f"{name}.dtype == torch.{dtypes[0]}",
                f"{name} is {{_name({name}.dtype)}}, {dtypes[0]} is needed", (),
            )  # fmt: skip
        else:
            options = ", ".join(f"torch.{d}" for d in dtypes)
            yield (
                "DtypeError", f"{name}.dtype in ({options})",
                f"{name} is {{_name({name}.dtype)}}, {' or '.join(dtypes)} is needed", (),
            )  # fmt: skip
        if argument.layout == "contiguous":
            strides = f"{name} is not contiguous: its strides are {{tuple({name}.stride())}}"
            yield "LayoutError", f"{name}.is_contiguous()", strides, ()
        elif argument.layout == "rows":
            apart = f"{name} has stride {{{name}.stride(-1)}} along its last axis, 1 is needed"
            yield "LayoutError", f"{name}.stride(-1) == 1", apart, needs
        if name != device:
            away = f"{name} is on {{{name}.device}}, {device} on {{{device}.device}}"
            yield "DeviceError", f"{name}.device == {device}.device", away, ()

    def _refusal(self) -> str:
        parameters = ", ".join(a.name for a in self.kernel.arguments)
        lines = [
            "def _name(dtype):", '    return str(dtype).removeprefix("torch.")', "", "",
            "def _describe(name, axes, tensor):",
            "    sizes = [str(n) for n in tensor.shape]",
            "    if len(axes) == len(sizes):",
            '        sizes = [f"{axis}={n}" for axis, n in zip(axes, sizes)]',
            "    return f\"  {name}  [{', '.join(sizes)}]  {_name(tensor.dtype)}  {tensor.device}\"", "", "",
            f"def _refusal({parameters}):",
            '    """The error that names everything wrong with a call."""',
            "    tensors = {",
        ]  # fmt: skip
        width = max(map(len, self.tensor_names))
        for argument in self.kernel.tensors:
            axes = tuple(str(a.name) for a in argument.tensor.axes)
            lines.append(f'        "{argument.name.ljust(width)}": ({axes!r}, {argument.name}),'.replace("'", '"'))
        scalars = [a for a in self.kernel.arguments if isinstance(a, Scalar | Flag)]
        lines += [
            "    }",
            *(line for a in self.kernel.tensors if a.optional for line in (
                f"    if {a.name} is None:", f'        del tensors["{a.name.ljust(width)}"]',
            )),
            "    problems = [",
            '        (DtypeError, f"{name.strip()} is of type {type(value).__name__}, a tensor is needed")',
            "        for name, (_, value) in tensors.items()",
            "        if not isinstance(value, torch.Tensor)",
            "    ]",
            *(f"    is_{n} = isinstance({n}, torch.Tensor)" for n in self.tensor_names),
            *(f"    is_{a.name} = {_type_test(a)}" for a in scalars),
        ]
        for error, holds, message, needs in self._checks():
            # A check asks only of arguments that are of their type, and of the rank it needs.
            asked = [a.name for a in self.kernel.arguments if not getattr(a, "optional", False)]
            named = _names(holds, [*asked, *self._optional(holds)])
            guard = [f"{'fits' if n in needs and n in self.tensor_names else 'is'}_{n}" for n in named]
            compound = " and " in holds or " or " in holds
            condition = " and ".join([*guard, f"not ({holds})" if compound else f"not {holds}"])
            if ".dim()" in holds:
                lines.append(f"    fits_{named[0]} = is_{named[0]} and {holds}")
                condition = f"is_{named[0]} and not fits_{named[0]}"
            elif "isinstance(" in holds:
                condition = f"not is_{named[0]}"
            lines.append(f"    if {_negated(condition)}:")
            lines.append(f'        problems.append(({error}, f"{message}"))')
        lines += [
            "    kinds = {kind for kind, _ in problems}",
            "    error = kinds.pop() if len(kinds) == 1 else ContractError",
            "    lines = [text for _, text in problems]",
            "    lines += [_describe(n, a, t) for n, (a, t) in tensors.items() if isinstance(t, torch.Tensor)]",
            f'    return error("{self.kernel.name}: " + "\\n".join(lines))', "", "",
        ]  # fmt: skip
        return "\n".join(lines)

    def _choose(self) -> str:
        names = list(self.kernel.quantities)
        return "\n".join([
            f"def _choose(thresholds, {', '.join(names)}):",
            '    """The number and configuration of the first rule that fits; `thresholds` replaces all thresholds."""',
            "    quantities = {" + ", ".join(f'"{n}": {n}' for n in names) + "}",
            "    for number, (least, config) in enumerate(RULES):",
            "        if all(",
            "            quantities[name] >= (value if thresholds is None else thresholds)",
            "            for name, value in least.items()",
            "        ):",
            "            return number, config", "", "",
            "def _forced(config):",
            '    """A configuration given by the caller, checked."""',
            "    wanted = {" + ", ".join(f'"{n}"' for n in (*self.kernel.tiles, "num_warps", "num_stages")) + "}",
            '    problems = [f"{name} is missing" for name in sorted(wanted - set(config))]',
            '    problems += [f"{name} is unknown" for name in sorted(set(config) - wanted)]',
            "    for name in sorted(wanted & set(config)):",
            '        value, kind = config[name], "whole number above 0" if name == "num_stages" else "power of two"',
            '        if type(value) is not int or value < 1 or kind == "power of two" and value & (value - 1):',
            '            problems.append(f"{name} = {value!r} is no {kind}")',
            "    problems += [",
            '        f"{name} = {config[name]}, this module has {value}"',
            "        for name, value in FIXED.items()",
            "        if config.get(name, value) != value",
            "    ]",
            "    if problems:",
            f'        raise ContractError("{self.kernel.name}: config: " + "; ".join(problems))',
            "    return None, config", "", "",
        ])  # fmt: skip

    # -- the call
    def _divided(self, tile: str) -> list[str]:
        return [size.name for size in self.kernel.divides[tile]]

    def _refit(self, tile: str) -> str:
        other, sizes = self.refits[tile], self._divided(tile)
        if other is None:
            return "\n".join([
                f"def _refitted_{tile}(config, {', '.join(sizes)}):",
                f'    """`config` with a tile of {tile} that divides."""',
                f'    {tile} = config["{tile}"]',
                f"    while {' or '.join(f'{size} % {tile}' for size in sizes)}:",
                f"        {tile} //= 2",
                f'    return config if {tile} == config["{tile}"] else {{**config, "{tile}": {tile}}}', "", "",
            ])  # fmt: skip
        return "\n".join([
            f"def _refitted_{tile}(config, {', '.join(sizes)}):",
            f'    """`config` with a tile of {tile} that divides, and as many more {other}."""',
            f'    {tile}, {other} = config["{tile}"], config["{other}"]',
            f"    while {' or '.join(f'{size} % {tile}' for size in sizes)}:",
            f"        {tile}, {other} = {tile} // 2, {other} * 2",
            f'    if {tile} == config["{tile}"]:',
            "        return config",
            "    return {**config, " + f'"{tile}": {tile}, "{other}": {other}' + "}", "", "",
        ])  # fmt: skip

    def _refitted(self) -> list[str]:
        return [f"    config = _refitted_{t}(config, {', '.join(self._divided(t))})" for t in self.refits]

    def _picked(self) -> list[str]:
        """The configuration that an integer argument of the contract asks for."""
        if self.kernel.forces is None:
            return []
        name, _ = self.kernel.forces
        return [f"    if config is None and {name} > 0:", f"        config = FORCED[{name}]"]

    def _host_sizes(self) -> dict[str, str]:
        """Host text of every size that the kernels take."""
        host = dict(self.kernel.derived)
        for argument in self.kernel.arguments:
            if isinstance(argument, Flag):
                continue
            if isinstance(argument, Scalar):
                if argument.size:
                    host[argument.size.name] = argument.name
                continue
            for i, axis in enumerate(argument.tensor.axes):
                size, stride = axis.size.single, argument.tensor.source.strides[i].single
                absent = f"0 if {argument.name} is None else " if argument.optional else ""
                if isinstance(size, Size):
                    host.setdefault(size.name, f"{absent}{argument.name}.shape[{i}]")
                if isinstance(stride, Size):
                    host.setdefault(stride.name, f"{absent}{argument.name}.stride({i})")
        missing = [n for n in (*self.runtime, *self.constexprs) if n not in host]
        if missing:
            raise GenerationError(f"{self.kernel.name}: no argument gives {', '.join(missing)}")
        return host

    def _public(self) -> str:
        parameters = [str(p.replace(annotation=inspect.Parameter.empty)) for p in self._parameters()]
        doc = _indented(inspect.getdoc(self.public) or "", "    ")
        used = self._used()
        lines = [
            f"def {self.kernel.name}({', '.join([*parameters, '*', 'config=None', 'thresholds=None'])}):",
            f'    """{doc.strip()}',
            "",
            "    `config` forces a configuration; `thresholds` replaces every threshold of RULES.",
            '    """',
            *self._checked(),
            *self._slot_check(),
            *self._byte_views(),
        ]
        quantities = {n: _inlined(text, self.host, used) for n, text in self.kernel.quantities.items()}
        lines += [
            *self._picked(),
            "    if config is None:",
            f"        rule, config = _choose(thresholds, {', '.join(quantities.values())})",
            *([] if self.exact else [f"    {line}" for line in self._refitted()]),
            "    else:",
            "        rule, config = _forced(config)",
            *(self._refitted() if self.exact else []),
            f"    device = {self.tensor_names[0]}.device",
            *self._outputs(),
            '    if device.type == "cpu" or device.index == torch.get_device_module(device).current_device():',
            f"        _launch({', '.join(['rule', 'config', *self._arguments()])})",
            "    else:",
            "        with torch.get_device_module(device).device(device):",
            f"            _launch({', '.join(['rule', 'config', *self._arguments()])})",
            *self._returned(), "", "",
        ]  # fmt: skip
        return "\n".join(lines)

    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.public).parameters.values())

    def _used(self) -> list[str]:
        """The sizes that the call computes."""
        return [n for n in self.host if n in {*self.runtime, *self.constexprs} and self.host[n] != n]

    def _checked(self) -> list[str]:
        """The checks of a call, then its flags and sizes."""
        conditions = []
        for _, holds, _, _ in self._checks():
            absent = [f"{name} is None or " for name in self._optional(holds)]
            conditions.append(f"({''.join(absent)}{holds})" if absent or " and " in holds or " or " in holds else holds)
        return [
            "    try:",
            "        fits = (",
            *(f"            {'and ' if i else ''}{c}" for i, c in enumerate(conditions)),
            "        )",
            "    except (AttributeError, TypeError):  # not even a tensor",
            "        fits = False",
            "    if not fits:",
            f"        raise _refusal({', '.join(a.name for a in self.kernel.arguments)})",
            *(f"    {n} = {flag.value}" for n, flag in self.kernel.all_flags.items() if flag.value and n in self.flags),
            *(f"    {n} = {self.host[n]}" for n in self._used()),
        ]

    def _returned(self) -> list[str]:
        return [f"    return {', '.join(o.name for o in self.kernel.outputs)}"] if self.kernel.outputs else []

    def _outputs(self) -> Iterator[str]:
        for output in self.kernel.outputs:
            like = output.tensor.source.dtype.removeprefix("like:")
            yield f"    {output.name} = torch.empty({output.shape}, dtype={like}.dtype, device=device)"

    def _slot_check(self) -> Iterator[str]:
        if self.kernel.slots:
            yield f"    if CHECK_SLOTS:\n        _check_slots({', '.join(self.kernel.slots)})"

    def _byte_views(self) -> Iterator[str]:
        """Kernels take float8 tensors as bytes: not every compiler has a pointer to the type."""
        for argument in self.kernel.tensors:
            if "e4m3" in argument.dtypes:
                view = f"{argument.name} = {argument.name}.view(torch.uint8)"
                test = f"    if {argument.name}.dtype == torch.{self.e4m3}:\n    "
                yield (test if len(argument.dtypes) > 1 else "") + f"    {view}"

    def _check_slots(self) -> Iterator[str]:
        if self.kernel.slots:
            yield f'''def _check_slots(slots, count):
    """Raises for the first slot that the cache does not have; waits for the device."""
    beyond = torch.nonzero(slots >= count)
    if beyond.numel() > 0:
        at = int(beyond[0])
        raise ContractError(
            f"{self.kernel.name}: {self.kernel.slots[0]}[{{at}}] is {{int(slots[at])}}, "
            f"the cache has {{count}} slots"
        )

'''

    def _arguments(self) -> list[str]:
        return [*self.tensor_pointers(), *self.scalars, *self.runtime, *self.constexprs, *self.flags]

    def _count(self, grid: Expr) -> str:
        """Host text of a number of programs."""
        text = render(grid, lambda a: str(a.low) if isinstance(a, Size) and a.low == a.high else a.label)
        return text if len(grid.terms) == 1 else f"({text})"

    def _where_used(self, pointer: str) -> str:
        """` if .. else None`, where one flag says whether any device function takes a view."""
        for programs in self.variants[0].branches:
            takes = {values: pointer in text.pointers for values, text in programs.texts.items()}
            if not any(takes.values()) or all(takes.values()):
                continue
            for i, name in enumerate(programs.branch.flags):
                used = sorted({values[i] for values, taken in takes.items() if taken}, key=str)
                unused = {values[i] for values, taken in takes.items() if not taken}
                if not unused & set(used):
                    if isinstance(used[0], bool):
                        return f" if {'' if used[0] else 'not '}{name} else None"
                    tests = " or ".join(f'{name} == "{value}"' for value in used)
                    return f" if {tests} else None"
        return ""

    def tensor_pointers(self) -> list[str]:
        return [n for n in self.pointers if n not in self.views]

    def _launch(self) -> str:
        variants = self.variants
        lines = [
            f"def _launch(rule, config, {', '.join(self._arguments())}):",
            "    global last_launch",
            *(f'    {t} = config["{t}"]' for t in self.tiles),
            *self._in_parts(),
            "    programs = " + " + ".join(
                self._when(p.branch, self._count(p.first.grid)) for p in variants[-1].branches
            ),
            "    if programs == 0:",
            "        return",
        ]
        for name, view in self.views.items():
            like = view.dtype.removeprefix("like:")
            # Only its address counts, so two bytes are enough; a shape of an odd number of bytes has no such view.
            start = f"{view.memory}.as_strided((2,), (1,)) if {view.memory}.numel() else {view.memory}.new_empty(2)"
            lines.append(f"    {name} = ({start}).view({like}.dtype){self._where_used(name)}")
        if self.index_type:
            lines.append(f"    narrow = _within_int32({', '.join(self.tensor_pointers())})")
            lines.append("    index_type = tl.int32 if narrow else tl.int64")
        branch_names = [branch.name for branch in self.kernel.branches]
        names = {g: f"{branch_names[g[0]]}_kernel" if len(self.groups) > 1 else "kernel" for g in self.groups}
        chosen = [{names[g]: self._kernel_name(variant, g) for g in self.groups} for variant in variants]
        if len(variants) > 1:
            test = " and ".join(
                f"{s.name} % {self.fixed.get(t, t)} == 0"
                for t, sizes in self.kernel.divides.items()
                for s in sizes
                if self.fixed.get(t) != 1
            )
            lines += [
                f"    if {test}:",
                *(f"        {name} = {kernel}" for name, kernel in chosen[0].items()),
                "    else:",
                *(f"        {name} = {kernel}" for name, kernel in chosen[1].items()),
            ]
        else:
            lines += [f"    {name} = {kernel}" for name, kernel in chosen[0].items()]
        flags = ", ".join(f'"{n}": {n}' for n in self.flags)
        launched = ' + " + " + '.join(f"{name}.__name__" for name in names.values())
        width = ', {"index_width": "i32" if narrow else "i64"}' if self.index_type else ""
        lines.append(f"    last_launch = (rule, config, {launched}, {{{flags}}}{width})")
        for group, name in names.items():
            branches = [variants[-1].branches[i] for i in group]
            runtime, constants = self._taken([variants[0].branches[i] for i in group])
            keywords = [f"{n}={n}" for n in constants]
            keywords += ['num_warps=config["num_warps"]', 'num_stages=config["num_stages"]', "enable_fp_fusion=True"]
            keywords += [f"{k}={v!r}" for k, v in sorted(self.profile.launch_kwargs.items())]
            parts = [f"{p.branch.name}_parts" for p in branches]
            call = self.grid.launch(
                name, runtime, keywords, f"{self.tensor_names[0]}.device",
                f"max({', '.join(parts)})" if len(parts) > 1 else parts[0],
            )  # fmt: skip
            if len(names) > 1:
                (programs,) = branches
                lines.append(f"    programs = {self._when(programs.branch, self._count(programs.first.grid))}")
                if self.grid.form != "chunked":
                    call = ["    if programs:", *("    " + line for line in call)]
            lines += call
        return "\n".join(lines) + "\n"

    def _in_parts(self) -> Iterator[str]:
        """Tiles larger than the device holds at once become parts, of which a program takes several."""
        if self.grid.budget is None:
            return
        for branch in self.kernel.branches:
            tiles = [t for t in branch.tiles if t not in self.fixed]
            limit = part_limit(self.kernel, branch, self.grid.budget)
            count = f"{branch.name}_parts" if self.grid.parts else "_"
            if tiles:
                yield f"    {', '.join([count, *tiles])} = _in_parts({limit}, {', '.join(tiles)})"
            elif self.grid.parts:
                yield f"    {count} = 1"


def _type_test(argument: Scalar | Flag) -> str:
    if isinstance(argument, Flag) and isinstance(argument.values[0], bool):
        return f"isinstance({argument.name}, bool)"
    if isinstance(argument, Flag):
        values = ", ".join(f'"{value}"' for value in argument.values)
        return f"(isinstance({argument.name}, str) and {argument.name} in ({values}))"
    kinds = "int" if argument.is_integer else "(int, float)"
    return f"(isinstance({argument.name}, {kinds}) and not isinstance({argument.name}, bool))"


def _names(text: str, known: Sequence[str]) -> list[str]:
    """The names of `known` that an expression mentions, in their order."""
    mentioned = {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}
    return [name for name in known if name in mentioned]


def _inlined(text: str, host: Mapping[str, str], bound: list[str]) -> str:
    """A quantity's text over sizes, with those that are no variables of the call replaced by their host text."""
    for name, value in host.items():
        if name not in bound and name in text:
            text = text.replace(name, value)
    return text


def _negated(condition: str) -> str:
    """`not a == b` as `a != b`."""
    if " or " in condition:
        return condition
    head, _, tail = condition.rpartition("not ")
    if " in (" in tail:
        return head + tail.replace(" in (", " not in (", 1)
    for operator, opposite in ((" == ", " != "), (" >= ", " < "), (" <= ", " > ")):
        if tail.count(operator) == 1 and " and " not in tail and " in " not in tail:
            return head + tail.replace(operator, opposite)
    return condition


def _indented(text: str, indent: str) -> str:
    return "\n".join(indent + line if line else "" for line in text.splitlines())

