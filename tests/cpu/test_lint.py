"""Texts against profiles: every generated one passes, and a violation of each rule is named with its source."""

from __future__ import annotations

import textwrap

import pytest

from tilewright import vendors
from tilewright.build import operators
from tilewright.lint import lint

A = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
ASCEND = "FlagGems-vllm ascend override"


@pytest.mark.parametrize("profile", vendors.names())
def test_every_generated_text_passes(profile: str) -> None:
    found = {op.name: lint(op.source(profile), vendors.load(profile)) for op in operators()}
    assert found == dict.fromkeys(found, []) and A in found


ROWS = "y = tl.load(x + tl.arange(0, rows)[:, None] * 512 + tl.arange(0, 512)[None, :])"
KERNEL = """
@triton.jit
def helper(x):
    return x + 1

@triton.jit
def kernel(x, n, flag: tl.constexpr, rows: tl.constexpr):
{body}
"""
RULES = 'RULES = (({{}}, {{"rows": {rows}, "num_warps": {warps}, "num_stages": {stages}}}),)\n'


def module(body: str = "    pass", rows: int = 16, warps: int = 1, stages: int = 1, host: str = "") -> str:
    body = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    return KERNEL.format(body=body) + RULES.format(rows=rows, warps=warps, stages=stages) + textwrap.dedent(host)


DOT = """
a = tl.load(x + tl.arange(0, rows)[:, None] + tl.arange(0, 64)[None, :])
b = tl.load(x + tl.arange(0, 64)[:, None] + tl.arange(0, {n})[None, :])
acc = tl.zeros((rows, {n}), dtype=tl.float32)
acc = tl.dot(a, b, acc)
"""
LAUNCH = """
def _launch(programs):
    kernel[(programs,)](1)
"""
CHUNKS = """
def _launch(programs):
    for first_program in range(0, programs, 65536):
        count = min(65536, programs - first_program)
        kernel[(count,)](1)
"""
PLANE = """
def _launch(programs):
    kernel[(7, 2)](1)
"""
PARTS = """
def _launch(rows):
    parts, rows = _in_parts(16, rows)
"""
# rule and case: device, text, lines of the module and what is said of them
VIOLATIONS = {
    "word: a function": (
        "hygon-bw1000", module("y = tl.div_rn(1.0, x)"),
        ["line 8: word: tl.div_rn [support.op.div_rn = unsupported: measured, Torch-FL #29: no lowering]"],
    ),
    "word: a reduction": (
        "mthreads-s5000", module("y = tl.min(x, axis=0)"),
        ["line 8: word: tl.min [support.op.min = unsupported: stated, NineToothed targets.py: the reduction]"],
    ),
    "word: e4m3": (
        "thead-zw810e", module("y = x.to(tl.float8e4nv)"),
        ["line 8: word: tl.float8e4nv "
         "[support.cast.e4m3 = unsupported: measured, FlagTree #1005, #975: rejected below 89]"],
    ),
    "word: float64": (
        "cambricon-mlu590", module("y = x.to(tl.float64)"),
        ["line 8: word: tl.float64 [support.dtype.fp64 = unsupported: stated, FlagGems]"],
    ),
    "word: libdevice": (
        "nvidia-h200", module("y = libdevice.rsqrt(x)"),
        ["line 8: word: libdevice.rsqrt: words of tl alone are the same everywhere "
         "[libdevice = triton.language.extra.cuda.libdevice: stated, Triton]"],
    ),
    "word: an option of a load": (
        "ascend-910b", module('y = tl.load(x, eviction_policy="evict_first")'),
        ["line 8: word: eviction_policy [support.op.load_options = unsupported: stated, "
         "triton-ascend docs: cache_modifier, eviction_policy, volatile, padding_option]"],
    ),
    "form: a cast of a pointer": (
        "ascend-910b", module("y = x.to(tl.pointer_type(tl.bfloat16))"),
        ["line 8: form: a pointer's element type is cast "
         f"[lowering.ptr_recast = wrapper_view: measured, {ASCEND}]"],
    ),
    "form: pairs by a reshape": (
        "generic", module("y = tl.reshape(tl.arange(0, 64), (32, 2))"),
        ["line 8: form: pairs made by a reshape "
         "[lowering.pair = pair_address: default, some compilers cannot reshape [64] to [32, 2]]"],
    ),
    "form: an early return": (
        "metax-c550", module("if n > 3:\n    return\ntl.store(x, 1)"),
        ["line 9: form: an early return "
         "[lowering.branch = positive_if: default, some compilers abort on an early return]"],
    ),
    "form: what an arm may not hold": (
        "ascend-910b", module("if n > 3:\n    y = helper(x)\nelse:\n    for i in range(4):\n        tl.store(x, i)"),
        [f"line 9: form: helper is called in an arm of an if [lowering.branch = separate: measured, {ASCEND}: "
         "a device function or loop in an arm aborts]",
         f"line 11: form: a loop in an arm of an if [lowering.branch = separate: measured, {ASCEND}: "
         "a device function or loop in an arm aborts]"],
    ),
    "form: 64 bits": (
        "cambricon-mlu590", module("y = n.to(tl.int64)"),
        ["line 8: form: an index of 64 bits "
         "[lowering.index_width = i32: stated, NineToothed #221: 64-bit immediates are limited]"],
    ),
    "form: tiles that do not divide": (
        "ascend-910b", module().replace("def kernel(", "def x_kernel_masked("),
        ["line 7: form: a kernel for tiles that do not divide "
         f"[lowering.tail = exact: measured, {ASCEND}: rows out of range fault]"],
    ),
    "dot": (
        "metax-c550", module(DOT.format(n=8), rows=4),
        ["line 11: dot: tl.dot with M = 4, N = 8 [min_dot = 16, 16, 16: measured, "
         "smaller tiles fail an MMA assertion; source not named]"],
    ),
    "on-chip: operands": (
        "metax-c550", module(DOT.format(n=256), rows=256, stages=2),
        ["line 11: on-chip: operands of 131072 bytes over 2 stages [scratch_bytes = 65536: stated, FlagGems #4653]"],
    ),
    "on-chip: a reshape": (
        "hygon-bw1000", module("y = tl.reshape(tl.arange(0, 32768), (rows, 2048))"),
        ["line 8: on-chip: a tile of 16 x 2048 takes 131072 bytes, 65536 are there "
         "[scratch_bytes = 65536: measured, FlagGems #4286: 66,560 asked, 65,536 allowed]"],
    ),
    "on-chip: live copies": (
        "ascend-910b", module(ROWS, rows=32),
        ["line 8: on-chip: a tile of 32 x 512 takes 196608 bytes, 98304 are there "
         "[scratch_bytes = 196608: stated, triton-ascend docs: unified buffer of a vector core]"],
    ),
    "grid: unbounded": (
        "ascend-910b", module(host=LAUNCH),
        ["line 12: grid: a launch of any number of programs along x "
         "[grid_limit = 65535, 1, 1: stated, triton-ascend: coreDim]"],
    ),
    "grid: a chunk too large": (
        "ascend-910b", module(host=CHUNKS),
        ["line 14: grid: a launch of 65536 programs along x "
         "[grid_limit = 65535, 1, 1: stated, triton-ascend: coreDim]"],
    ),
    "grid: another axis": (
        "cambricon-mlu590", module(host=PLANE),
        ["line 12: grid: a launch of 2 programs along y "
         "[grid_limit = 65535, 1, 1: stated, NineToothed targets.py: triton_grid_limit]"],
    ),
    "warps": (
        "metax-c550", module(warps=16),
        ["line 9: warps: num_warps = 16 [num_warps = 1, 2, 4, 8: stated, FlagGems heuristics_config_utils.py]",
         "line 9: warps: num_warps = 16 are 1024 threads "
         "[max_threads = 512: stated, FlagGems heuristics_config_utils.py: 8 warps of 64]"],
    ),
    "stages": (
        "mthreads-s5000", module(stages=3),
        ["line 9: warps: num_stages = 3 "
         "[num_stages = 1, 2: measured, FlagTree #1223: 3 is silently wrong if the loop branches]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("profile", "text", "said"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_violation_of_each_rule(profile: str, text: str, said: list[str]) -> None:
    assert [str(violation) for violation in lint(text, vendors.load(profile))] == said


# What must pass

ALLOWED = {
    "a constant decides": ("ascend-910b", module("if flag:\n    y = helper(x)\nelse:\n    y = helper(n)")),
    "a return at the end": ("ascend-910b", module("return x")),
    "tiles in parts": ("ascend-910b", module(ROWS, rows=32, host=PARTS)),
    "a dot of the least size": ("metax-c550", module(DOT.format(n=16), rows=16)),
    "an unknown size": ("metax-c550", module("y = tl.dot(x, x)")),
    "chunks": ("ascend-910b", module(host=CHUNKS.replace("65536", "65535"))),
    "large launches": ("nvidia-h200", module(host=LAUNCH)),
    "pairs by a reshape": ("nvidia-h200", module("y = tl.reshape(tl.arange(0, 64), (32, 2))")),
    "no facts of a device": ("generic", module("y = tl.arange(0, 65536)")),
}


@pytest.mark.parametrize(("profile", "text"), ALLOWED.values(), ids=ALLOWED.keys())
def test_what_passes(profile: str, text: str) -> None:
    assert lint(text, vendors.load(profile)) == []


def test_one_devices_text_is_not_anothers() -> None:
    """The H200's text breaks these rules elsewhere, and none at home."""
    (operator,) = operators([A])
    text = operator.source("nvidia-h200")
    broken = {name: {violation.rule for violation in lint(text, vendors.load(name))} for name in vendors.names()}
    assert broken == {
        "amd-mi300x": set(), "amd-mi355x": set(), "nvidia-b200": set(), "nvidia-h100": set(), "nvidia-h200": set(),
        "hygon-bw1000": set(), "metax-c550": set(), "mthreads-s5000": set(),
        "nvidia-a100": {"word"}, "thead-zw810e": {"word", "form"},
        "ascend-910b": {"word", "form", "grid", "warps"}, "cambricon-mlu590": {"word", "form", "grid", "warps"},
        "generic": {"word", "form", "grid"},
    }  # fmt: skip
