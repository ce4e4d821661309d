"""Checks the texts of other vendors' profiles on one NVIDIA GPU and prints one line a case.

    python tests/gpu/check_vendors.py                           # everything
    python tests/gpu/check_vendors.py --groups insert qk        # some groups
    python tests/gpu/check_vendors.py --match ascend-910b       # the cases whose name has this

Their tilings, grids, index widths and encoders are executed, if not on their card. Results are judged as those of the
H200's own text. After each case the launch log must name the profile, the kernels and every lowering that was asked
for, and the launches must have the form that the profile's grid says.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import deepseek_v4  # noqa: E402
import deepseek_v4_siblings as siblings  # noqa: E402
import qk_norm_rope  # noqa: E402
import runner  # noqa: E402
from runner import GIB, Result  # noqa: E402

import tilewright  # noqa: E402
from tilewright import ops, vendors  # noqa: E402
from tilewright.grid import Grid  # noqa: E402
from tilewright.launch import OPERATORS  # noqa: E402

PROFILES = (
    "hygon-bw1000", "metax-c550", "mthreads-s5000", "thead-zw810e", "ascend-910b", "cambricon-mlu590", "generic",
)  # fmt: skip
A, B = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "fused_qk_norm_rope"
GATHER = siblings.GATHER
FAR_BYTES = {A: 4 * GIB, B: 2 * (2 * qk_norm_rope.FAR + 2 * 8192)}  # what `run_far` takes, about


@dataclass(frozen=True)
class Check:
    """A case of an operator under a profile; `kind` is call, far or many (programs for more than one launch)."""

    group: str
    operator: str
    case: Any
    profile: str
    kind: str = "call"
    thresholds: int | None = None

    def own_bytes(self) -> int:
        """Bytes of the operator's own tensors."""
        return self.case.own_bytes + (FAR_BYTES[self.operator] if self.kind == "far" else 0)

    def __str__(self) -> str:
        words = [self.group, self.profile, str(self.case)]
        words += [self.operator] if self.group == "siblings" else []
        words += ["first_rule"] if self.thresholds == 0 else []
        words += [self.kind] if self.kind != "call" else []
        return " ".join(words)


# The cases


def problem(tokens: int, heads: int, **more: Any) -> deepseek_v4.Case:
    return deepseek_v4.Case(tokens, heads, **{"block_size": 64, "max_position": max(tokens, 4096), **more})


def every_check() -> Iterator[Check]:
    for profile in PROFILES:
        yield from insert_checks(profile)
        yield from sibling_checks(profile)
        yield from qk_checks(profile)


def insert_checks(profile: str) -> Iterator[Check]:
    half = torch.float16
    for thresholds, (tokens, heads) in itertools.product((None, 0), ((17, 3), (512, 64), (777, 64))):
        yield Check("insert", A, problem(tokens, heads, slots="skipping"), profile, thresholds=thresholds)
    for dtype in (torch.bfloat16, half):
        for tokens, content in ((9, "not finite"), (41, "thresholds")):
            yield Check("insert", A, problem(tokens, 8, dtype=dtype, content=content), profile)
        yield Check("insert", A, problem(146, 1, dtype=dtype, content="every value"), profile)
    yield Check("insert", A, problem(40, 12, inserted=24, slots="skipping", strided=True), profile)
    yield Check("insert", A, problem(0, 8), profile)
    yield Check("insert", A, deepseek_v4.Case(17, 8, 16), profile, "far")
    yield Check("insert", A, problem(131072, 64), profile, "many")


def sibling_checks(profile: str) -> Iterator[Check]:
    fnuz = vendors.load(profile).lowering["e4m3_format"] == "fnuz"
    for (name, cache), tokens in itertools.product(siblings.cases(), (17, 512)):
        padded = 24 if name == siblings.PADDED else None
        case = siblings.Case(name, problem(tokens, 16, slots="skipping"), cache, padded)
        yield Check("siblings", name, siblings.profile_case(case, fnuz), profile)
    for cache in ("packed", "mx"):
        case = siblings.Case(siblings.PADDED, problem(512, 1, slots="skipping"), cache, 0)
        yield Check("siblings", GATHER, siblings.profile_case(case, fnuz), profile)


def qk_checks(profile: str) -> Iterator[Check]:
    for rotary, neox, heads in ((None, True, (16, 8, 8)), (96, True, (16, 8, 8)), (36, False, (5, 3, 1))):
        for tokens in (17, 1024):
            yield Check("qk", B, qk_norm_rope.Case(tokens, heads, 128, rotary, neox=neox), profile)
    yield Check("qk", B, qk_norm_rope.Case(33, (8, 4, 4), 80, 36, neox=True, dtype=torch.float16), profile)
    yield Check("qk", B, qk_norm_rope.Case(33, (8, 4, 4), content="not finite"), profile)
    yield Check("qk", B, qk_norm_rope.Case(3, (16, 8, 8)), profile, "far")
    yield Check("qk", B, qk_norm_rope.Case(65536, (64, 8, 8)), profile, "many")


# How a case is called, and what its launches must be


class Counted:
    """Stands for a kernel of a module and notes the grid of each launch."""

    def __init__(self, kernel: Any, launches: list[tuple[str, int]]) -> None:
        self.kernel, self.launches, self.__name__ = kernel, launches, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        self.launches.append((self.__name__, grid[0]))
        launch: Callable[..., Any] = self.kernel[grid]
        return launch


def call(inputs: Any, check: Check) -> str:
    """The operator, judged; then its launch log and the launches of one call more."""
    options = {"profile": check.profile, "thresholds": check.thresholds}
    far = check.kind == "far"
    if check.operator == A:
        function = getattr(ops, A)
        (deepseek_v4.run_far if far else deepseek_v4.run)(function, inputs, **options)
        again = lambda: function(*inputs.arguments(), **options)  # noqa: E731
    elif check.operator == B:
        function = getattr(ops, B)
        (qk_norm_rope.run_far if far else qk_norm_rope.run)(function, inputs, **options)
        again = lambda: function(*inputs.arguments(), **options)  # noqa: E731
    elif check.operator == GATHER:
        inputs.call(**options)
        again = lambda: siblings.check_gathered(inputs, inputs.made.slot_mapping, **options)  # noqa: E731
        again()
    else:
        siblings.run(inputs, **options)
        again = lambda: inputs.call(**options)  # noqa: E731
    if check.case.tokens == 0:
        return "nothing to launch"
    check_log(check)
    module: Any = OPERATORS[check.operator].module(check.profile, False)
    launches: list[tuple[str, int]] = []
    own = {name: value for name, value in vars(module).items() if name.startswith(f"{check.operator}_kernel")}
    try:
        vars(module).update({name: Counted(kernel, launches) for name, kernel in own.items()})
        again()
    finally:
        vars(module).update(own)
    check_launches(check, launches)
    grids = ", ".join(f"{name.removeprefix(check.operator + '_')} {grid}" for name, grid in launches)
    return f"{grids if len(launches) < 4 else f'{len(launches)} launches'}"


def check_log(check: Check) -> None:
    """The log names the operator, the profile and each of its lowerings, and that nothing was interpreted."""
    launch = tilewright.last_launch()
    expected = dict(vendors.load(check.profile).lowering)
    if check.kind == "far" or (check.kind == "many" and check.case.own_bytes >= 2**32):
        expected["index_width"] = "i64"  # the offsets do not fit
    found = (launch.operator, launch.profile, launch.compiled, dict(launch.lowerings))
    if found != (check.operator, check.profile, True, expected):
        raise AssertionError(f"the launch log says {found}, not {check.operator}, {check.profile}, True, {expected}")


def check_launches(check: Check, launches: list[tuple[str, int]]) -> None:
    """As many launches, of as many programs, as the profile's grid allows; a kernel for each branch if it says so."""
    form = Grid.of(vendors.load(check.profile))
    names, grids = {name for name, _ in launches}, [grid for _, grid in launches]
    branches = len(OPERATORS[check.operator].kernel.branches)
    problems = []
    if not launches:
        problems.append("nothing was launched")
    if max(grids, default=0) > form.limit:
        problems.append(f"{max(grids)} programs in one launch, {form.limit} are allowed")
    if form.form == "persistent" and max(grids, default=0) > torch.cuda.get_device_properties(0).multi_processor_count:
        problems.append(f"{max(grids)} programs of a persistent grid")
    if form.form != "chunked" and len(launches) != len(names):
        problems.append(f"{len(launches)} launches of {len(names)} kernels")
    if form.form == "chunked" and check.kind == "many" and len(launches) < 2:
        problems.append("one launch of what should be several")
    if form.separate and branches > 1 and not all(name.split("_kernel_")[1:] for name in names):
        problems.append(f"kernels {sorted(names)}, not one for each branch")
    if not form.separate and len(names) != 1:
        problems.append(f"kernels {sorted(names)}, not one")
    if problems:
        raise AssertionError("; ".join(problems))


def make(case: Any, device: torch.device) -> Any:
    """The inputs of a case, with room for what a call returns."""
    if isinstance(case, deepseek_v4.Case):
        return deepseek_v4.make(case, device)
    if isinstance(case, qk_norm_rope.Case):
        return qk_norm_rope.make(case, device)
    inputs = siblings.make(case, device)
    if case.operator == siblings.PADDED:
        inputs.room = torch.empty(case.tokens * case.q_heads * 1024, dtype=torch.uint8, device=device)
    return inputs


def run_check(check: Check) -> Result:
    """A case, judged; never raises."""
    return runner.judged(check, make, call, far_bytes=FAR_BYTES.get(check.operator, 0))


def main(arguments: Iterable[str] | None = None) -> int:
    return runner.main("checks of other vendors' texts on a GPU", list(every_check()), run_check, arguments)


if __name__ == "__main__":
    sys.exit(main())
