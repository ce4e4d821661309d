"""Operators as torch sees them: schemas, fakes, opcheck, torch.compile, and what importing does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from samples import PADDED, SAMPLES, A, B, cloned, contents, operators, sample
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright import interpret, ops
from tilewright.errors import DeviceError, ShapeError
from tilewright.launch import OPERATORS

EVERY = pytest.mark.parametrize("name", SAMPLES)
SCHEMAS = {
    A: "(Tensor! q, Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache, "
    "float eps, int cache_block_size) -> ()",
    PADDED: "(Tensor q_in, Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache, "
    "int q_head_padded, float eps, int cache_block_size, bool apply_q_norm=True, bool kv_mxfp8=False, "
    "bool apply_q_rope=True, bool is_q_interleaved=False) -> Tensor",
    "fused_deepseek_v4_kv_rope_insert": "(Tensor kv, Tensor! k_cache, Tensor slot_mapping, Tensor position_ids, "
    "Tensor cos_sin_cache, int cache_block_size, Tensor? fp8_scale=None, bool kv_mxfp8=False) -> ()",
    B: "(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, Tensor q_weight, "
    "Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids, int forced_token_heads_per_warp=-1) -> "
    "()",
}  # as vLLM's


def of_torch(operator: str) -> Any:
    return getattr(torch.ops.tilewright, operator)


def test_every_operator_has_a_sample_and_is_registered() -> None:
    assert {operator for operator, _ in SAMPLES.values()} == set(operators())
    for operator in operators():
        assert OPERATORS[operator].registered is of_torch(operator).default


@pytest.mark.parametrize("operator", SCHEMAS)
def test_schemas(operator: str) -> None:
    expected = torch._C.parse_schema(f"tilewright::{operator}{SCHEMAS[operator]}")
    assert of_torch(operator).default._schema == expected


@pytest.mark.parametrize("operator", operators())
def test_schemas_mark_what_is_mutated(operator: str) -> None:
    marked = [a.name for a in of_torch(operator).default._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert marked == [a.name for a in OPERATORS[operator].kernel.tensors if a.mutated]


@EVERY
def test_opcheck(name: str) -> None:
    operator, arguments = sample(name)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(a.dtype == torch.float8_e4m3fn for a in arguments if isinstance(a, torch.Tensor)):
        tests.remove("test_schema")  # it computes with its copies, and torch has no arithmetic in float8; see below
    torch.library.opcheck(of_torch(operator).default, tuple(arguments), test_utils=tests)


@EVERY
def test_only_what_is_marked_is_written(name: str) -> None:
    operator, given = sample(name)
    before = cloned(given)
    of_torch(operator)(*given)
    written = [
        argument.name
        for argument, a, b in zip(OPERATORS[operator].kernel.arguments, given, before, strict=True)
        if isinstance(a, torch.Tensor) and contents(a, []) != contents(b, [])
    ]
    marked = [a.name for a in of_torch(operator).default._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == marked


@EVERY
def test_torchs_operator_is_the_operator(name: str) -> None:
    operator, given = sample(name)
    ours, theirs = cloned(given), cloned(given)
    made = getattr(ops, operator)(*ours)
    assert contents(of_torch(operator)(*theirs), theirs) == contents(made, ours)


@EVERY
def test_fakes_run_nothing_and_make_what_the_operator_makes(name: str) -> None:
    operator, given = sample(name)
    real = getattr(ops, operator)(*cloned(given))
    with interpret.counting() as counts, FakeTensorMode() as mode:
        faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in given]
        for made in (of_torch(operator)(*faked), getattr(ops, operator)(*faked)):
            assert type(made) is type(real) or isinstance(made, torch.Tensor)
            if real is not None:
                assert (made.shape, made.dtype, made.stride()) == (real.shape, real.dtype, real.stride())
    assert counts.programs == 0


def test_fakes_check_as_the_operator_does() -> None:
    operator, given = sample("A")
    given[1] = given[1][:-1]
    with pytest.raises(ShapeError) as eager:
        getattr(ops, operator)(*given)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in given]
        with pytest.raises(ShapeError) as fake:
            of_torch(operator)(*faked)
    assert str(fake.value) == str(eager.value)


def test_meta_tensors_have_a_form_but_no_result() -> None:
    operator, given = sample("padded")
    given = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in given]
    assert of_torch(operator)(*given).shape == (5, 8, 512)
    with pytest.raises(DeviceError) as caught:
        getattr(ops, operator)(*given)
    assert str(caught.value) == f"{operator}: q_in is on meta, where nothing can run"


# torch.compile


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in SAMPLES), *((name, "inductor") for name in ("A", "padded", "B"))],
)
def test_a_compiled_function_is_the_eager_one(name: str, backend: str) -> None:
    operator, given = sample(name)
    torch._dynamo.reset()
    function = getattr(ops, operator)
    compiled = torch.compile(lambda *args: function(*args), fullgraph=True, backend=backend)
    ours, theirs = cloned(given), cloned(given)
    with interpret.counting() as counts:
        made = compiled(*theirs)
    assert counts.programs > 0
    assert contents(made, theirs) == contents(function(*ours), ours)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_split_call_and_return_a_view(dynamic: bool) -> None:
    """What a model does: a projection, the operator in place on it, and views of it, also of what was not changed."""

    def step(hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        qkv = hidden * 2
        before = qkv.view(-1, 7, 64)[:, :4]
        ops.fused_qk_norm_rope(qkv, *rest)
        q, k, v = qkv.split([256, 128, 64], dim=-1)
        return before, q.view(-1, 4, 64), k, v + 1, qkv

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (5, 3, 8):
        given = sample("B", seed=tokens, tokens=tokens)[1]
        got, wanted = compiled(*given), step(*given)
        assert contents(got, []) == contents(wanted, [])
        assert got[0].data_ptr() == got[1].data_ptr() == got[4].data_ptr()


def test_compiled_calls_of_other_numbers() -> None:
    """eps and the numbers of heads are numbers of the graph, also where torch would make them symbols."""

    def step(qkv: torch.Tensor, eps: float, heads: int, *rest: Any) -> torch.Tensor:
        ops.fused_qk_norm_rope(qkv, heads, 6 - heads, 1, 64, eps, *rest)
        return qkv

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for heads, eps in ((4, 1e-6), (2, 1e-5), (1, 0.5)):
        _, (qkv, *_, weight, other, table, is_neox, positions, forced) = sample("B")
        rest = (weight, other, table, is_neox, positions, forced)
        wanted = step(qkv.clone(), eps, heads, *rest)
        assert contents(compiled(qkv.clone(), eps, heads, *rest), []) == contents(wanted, [])


def test_a_compiled_function_refuses_what_the_operator_refuses() -> None:
    def step(*args: Any) -> None:
        ops.fused_qk_norm_rope(*args)

    _, given = sample("B")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="qkv has 448 columns, 4 \\+ 2 \\+ 2 heads of 64 need 512"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(*given[:3], 2, *given[4:])


def test_options_have_no_place_in_a_graph() -> None:
    def step(*args: Any) -> None:
        ops.fused_qk_norm_rope(*args, profile="generic")

    torch._dynamo.reset()
    text = f"{B}: config, thresholds and profile are for calls outside torch.compile"
    with pytest.raises(Exception, match=text):
        torch.compile(step, fullgraph=True, backend="aot_eager")(*sample("B")[1])


# Importing


@pytest.mark.parametrize(
    "imports",
    ["import torch\nfrom tilewright import ops", "from tilewright import ops\nimport torch"],
    ids=["torch first", "torch last"],
)
def test_the_order_of_imports_does_not_matter(imports: str) -> None:
    code = f"""
import sys
{imports}
print(torch.ops.tilewright.{B}.default._schema.name, torch.cuda.is_initialized())
print([f for f in sys.meta_path if type(f).__module__.startswith("tilewright")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"tilewright::{B} False\n[]\n", "")


def test_without_torch_operators_can_be_declared() -> None:
    code = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
from tilewright import ops
from tilewright.launch import OPERATORS
print(len(OPERATORS), len(OPERATORS["fused_qk_norm_rope"].source("generic")) > 1000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{len(operators())} True\n", "")
