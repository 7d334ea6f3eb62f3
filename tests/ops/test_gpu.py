"""Both operators on a GPU: their results against the float64 oracle, and their behaviour.

`make gpu-check` runs these. Legend: T tokens, D model width, H hidden width, E experts, K = top_k.
"""

from __future__ import annotations

import pytest
import torch

import gpu_cases
from custom_ops import ExpertOptions, offload_experts, reference
from custom_ops.kernels.configs import RangeConfig
from gpu_cases import PATHS, allow_tf32, check, gpu_case, launch_poisoned, plan_of, runs_on
from kernel_runs import in_out
from moe_cases import (
    EXPERT_FORMS,
    GROUP_FORMS,
    NORM_FORMS,
    OPS,
    ROUTER_FORMS,
    Case,
    assert_matches,
)
from packed_cases import packed_case

pytestmark = pytest.mark.gpu

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
GATED = {"activation": "silu", "gated": True}
# Which weights lie as (in, out).
LAYOUTS = [("w1",), ("w2",), ("w1", "w2")]

# Dtypes of tokens and of experts, and whether float32 products may round to TF32.
DTYPES = [
    pytest.param(FP32, FP32, False, id="fp32"),
    pytest.param(FP32, FP32, True, id="tf32"),
    pytest.param(FP16, FP16, False, id="fp16"),
    pytest.param(BF16, BF16, False, id="bf16"),
    pytest.param(FP32, FP16, False, id="fp32-fp16"),
    pytest.param(FP32, BF16, False, id="fp32-bf16"),
    pytest.param(BF16, FP32, False, id="bf16-fp32"),
    pytest.param(BF16, FP16, False, id="bf16-fp16"),
]
# Numbers of tokens, one for each path and tile size.
FEW, SMALL, LARGE = 2, 40, 1500


def ranges(path: str) -> tuple[RangeConfig, ...]:
    if not runs_on(path, gpu_cases.architecture()):
        pytest.skip("the device has no tensor maps")
    return PATHS[path]


# --- Numbers ---


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("form", ["int4", "mxfp4", "fp8", "fp8 rows", "nvfp4", "int8"])
def test_packed_experts(form, dtype, tokens, op):
    case = packed_case(
        op, form, group=32, zero_points="groups" if form == "int4" else "", shape=(tokens,),
        width=512, hidden=256, experts=8, dtype=dtype, **GATED,
    )  # fmt: skip
    on_gpu = {name: t.cuda() for name, t in case.arguments.items() if isinstance(t, torch.Tensor)}
    result = case.overload(**case.arguments | on_gpu, **case.options)
    assert_matches(result.cpu(), case.decoded().oracle(), case.plain.dtypes)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
@pytest.mark.parametrize(("tokens_dtype", "experts_dtype", "tf32"), DTYPES)
def test_dtypes(op, tokens, tokens_dtype, experts_dtype, tf32):
    case = gpu_case(op, tokens, x_dtype=tokens_dtype, dtype=experts_dtype, **GATED)
    with allow_tf32(allowed=tf32):
        # TF32 has float16's mantissa.
        check(case, {FP16} if tf32 else set())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 16, 17, 129, 1000, 4096])
def test_token_counts(op, tokens):
    check(gpu_case(op, tokens, width=256, hidden=192, experts=16, top_k=4, dtype=BF16, **GATED))


def test_programs_with_several_tiles_each():
    check(gpu_case("dropless", 6000, width=1024, hidden=512, top_k=4, dtype=BF16, **GATED))


@pytest.mark.parametrize("tokens", [FEW, LARGE])
@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_forms_of_experts(form, tokens):
    check(gpu_case("experts", tokens, dtype=FP16, **form))


@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_forms_of_experts_on_chip(form):
    check(gpu_case("experts", SMALL, width=96, dtype=FP16, **form))


@pytest.mark.parametrize("tokens", [FEW, LARGE])
@pytest.mark.parametrize("form", ROUTER_FORMS)
def test_forms_of_routers(form, tokens):
    check(gpu_case("dropless", tokens, experts=13, top_k=3, dtype=FP16, **form))


@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
@pytest.mark.parametrize("selection_bias", [True, False])
@pytest.mark.parametrize("experts", [6, 192])
@pytest.mark.parametrize("form", GROUP_FORMS)
def test_choices_among_groups(form, experts, selection_bias, tokens):
    sizes = {"experts": experts, "selection_bias": selection_bias}
    check(gpu_case("dropless", tokens, dtype=BF16, **sizes, **form))


@pytest.mark.parametrize("tokens", [FEW, LARGE])
@pytest.mark.parametrize("form", ROUTER_FORMS)
def test_a_selection_bias(form, tokens):
    check(gpu_case("dropless", tokens, experts=13, dtype=FP16, selection_bias=True, **form))


@pytest.mark.parametrize("tokens", [1, SMALL, 1500])
def test_a_router_as_deepseeks(tokens):
    form = {"scoring": "sigmoid", "routed_scaling": 2.5, "group_scoring": "top2_sum"}
    sizes = {"width": 256, "experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4}
    check(gpu_case("dropless", tokens, dtype=BF16, selection_bias=True, **form, **sizes, **GATED))


@pytest.mark.parametrize("tokens", [FEW, LARGE])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("weight_on_input", [True, False])
@pytest.mark.parametrize("width", [96, 136])
def test_biases_and_weights_on_input(width, weight_on_input, biases, tokens):
    case = gpu_case(
        "experts", tokens, width=width, dtype=BF16, biases=biases, weight_on_input=weight_on_input
    )
    check(case)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
@pytest.mark.parametrize("width", [96, 136])
@pytest.mark.parametrize("norm", NORM_FORMS)
def test_norm_and_residual(norm, width, tokens, op):
    check(gpu_case(op, tokens, width=width, dtype=BF16, **GATED, **norm))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(
    ("experts", "top_k"), [(1, 1), (3, 3), (128, 8), (256, 8), (1024, 32), (1000, 1), (32, 32)]
)
def test_numbers_of_experts_and_choices(op, tokens, experts, top_k):
    check(gpu_case(op, tokens, width=64, hidden=32, experts=experts, top_k=top_k, dtype=FP16))


@pytest.mark.parametrize("tokens", [FEW, SMALL, 600])
@pytest.mark.parametrize(
    ("width", "hidden"),
    [(8, 8), (16, 1000), (24, 40), (56, 200), (96, 384), (120, 72), (192, 768), (1000, 1048)],
)
def test_widths(width, hidden, tokens):
    check(gpu_case("dropless", tokens, width=width, hidden=hidden, dtype=FP16, **GATED))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_paths_on_poisoned_memory(path, dtype):
    case = gpu_case("dropless", 300, width=120, dtype=dtype, **GATED)
    result = launch_poisoned(plan_of(case, ranges(path)), case)
    assert_matches(result, case.oracle(), case.dtypes)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [1, FEW, 16, SMALL, 129, LARGE])
@pytest.mark.parametrize("width", [96, 136])
def test_plans_on_poisoned_memory(op, width, tokens):
    case = gpu_case(op, tokens, width=width, dtype=BF16)
    result = launch_poisoned(plan_of(case), case)
    assert_matches(result, case.oracle(), case.dtypes)


# --- Weights that lie as (in, out) ---


@pytest.mark.parametrize("weights", LAYOUTS)
@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [96, 136])
def test_weights_that_lie_as_in_out(width, op, tokens, weights):
    case = in_out(gpu_case(op, tokens, width=width, dtype=BF16, **GATED), *weights)
    check(case)


@pytest.mark.parametrize("weights", LAYOUTS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gating", ["plain", "gated", "interleaved"])
def test_paths_with_weights_that_lie_as_in_out(gating, path, weights):
    form = {"gated": gating != "plain", "interleaved": gating == "interleaved"}
    case = in_out(gpu_case("dropless", 300, width=120, dtype=BF16, **form), *weights)
    result = launch_poisoned(plan_of(case, ranges(path)), case)
    assert_matches(result, case.oracle(), case.dtypes)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
def test_dtypes_of_weights_that_lie_as_in_out(tokens, dtype):
    check(in_out(gpu_case("dropless", tokens, dtype=dtype, **GATED), "w1", "w2"))


# --- Sizes that have no kernels ---


@pytest.mark.parametrize("tokens", [0, FEW, LARGE])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"width": 12},
        {"hidden": 20},
        {"width": 16, "hidden": 8, "experts": 1025},
        {"width": 16, "hidden": 8, "experts": 40, "top_k": 33},
    ],
    ids=["width", "hidden", "experts", "top_k"],
)
def test_sizes_without_kernels(sizes, op, tokens):
    check(gpu_case(op, tokens, dtype=BF16, **sizes))


# --- Unusual routing ---


def routed(tokens: int, ids: torch.Tensor, **sizes) -> Case:
    case = gpu_case("experts", tokens, top_k=ids.shape[1], dtype=BF16, **sizes)
    return case.changed(expert_ids=ids.to(gpu_cases.DEVICE))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
@pytest.mark.parametrize("width", [96, 136])
def test_slots_without_expert(width, tokens, ids_dtype):
    ids = torch.randint(-1, 8, (tokens, 3), generator=torch.Generator().manual_seed(0))
    ids[0] = -1
    result = check(routed(tokens, ids.to(ids_dtype), width=width, biases=True))
    assert not result[0].any()


@pytest.mark.parametrize("tokens", [FEW, LARGE])
@pytest.mark.parametrize("width", [96, 136])
def test_no_slot_has_an_expert(width, tokens):
    assert not check(routed(tokens, torch.full((tokens, 2), -1), width=width)).any()


@pytest.mark.parametrize("expert", [0, 5, 63])
@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
def test_all_tokens_on_one_expert(tokens, expert):
    check(routed(tokens, torch.full((tokens, 2), expert), experts=64))


@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
def test_idle_experts(tokens):
    ids = torch.tensor([[3, 60]]).expand(tokens, 2).contiguous()
    case = routed(tokens, ids, experts=64)
    clean = check(case)
    for name in ("w1", "b1", "w2", "b2"):
        idle = torch.ones(64, dtype=torch.bool, device=gpu_cases.DEVICE)
        idle[[3, 60]] = False
        case.arguments[name][idle] = float("nan")
    assert torch.equal(case(), clean)


@pytest.mark.parametrize("path", PATHS)
def test_a_nan_stays_in_its_row(path):
    case = gpu_case("experts", 70, width=120, dtype=FP16)
    chosen = plan_of(case, ranges(path))
    clean = launch_poisoned(chosen, case)
    x = case.arguments["x"].clone()
    x[3, 5] = float("nan")
    result = launch_poisoned(chosen, case.changed(x=x))
    assert result[3].isnan().all()
    others = torch.arange(len(x), device=gpu_cases.DEVICE) != 3
    assert torch.equal(result[others], clean[others])


# --- Tensors of more than 2**31 elements ---


def need_memory(gibibytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of free device memory")


@pytest.mark.parametrize("tokens", [2, 600])
def test_weights_beyond_32_bits(tokens):
    need_memory(24)
    torch.manual_seed(0)
    E, D, H = 260, 2048, 4096
    w1 = torch.zeros(E, H, D, dtype=BF16, device="cuda")
    w2 = torch.zeros(E, D, H, dtype=BF16, device="cuda")
    assert w1.numel() > 2**31
    last = slice(E - 2, E)
    w1[last] = torch.randn_like(w1[last]) / D**0.5
    w2[last] = torch.randn_like(w2[last]) / H**0.5
    x = torch.randn(tokens, D, dtype=BF16, device="cuda")
    ids = torch.tensor([[E - 1, E - 2]], device="cuda").expand(tokens, 2).contiguous()
    weights = torch.rand(tokens, 2, device="cuda")
    result = torch.ops.moe.experts(x, ids, weights, w1, None, w2, None)
    small = (w1[last].clone(), None, w2[last].clone(), None)
    expected = reference.experts(x, ids - (E - 2), weights, *small, ExpertOptions())
    assert_matches(result, expected, {BF16})


def test_rows_beyond_32_bits():
    need_memory(40)
    torch.manual_seed(0)
    T, D, H, E, K = 300_000, 1024, 64, 8, 8
    w1 = torch.randn(E, H, D, dtype=BF16, device="cuda") / D**0.5
    w2 = torch.randn(E, D, H, dtype=BF16, device="cuda") / H**0.5
    x = torch.randn(T, D, dtype=BF16, device="cuda")
    ids = torch.rand(T, E, device="cuda").argsort(-1)[:, :K].contiguous()
    weights = torch.rand(T, K, device="cuda")
    assert T * K * D > 2**31
    result = torch.ops.moe.experts(x, ids, weights, w1, None, w2, None)
    some = torch.cat([torch.arange(50), torch.randint(T, (200,)), torch.arange(T - 50, T)]).cuda()
    few = torch.ops.moe.experts(x[some], ids[some], weights[some], w1, None, w2, None)
    assert_matches(result[some], few.double(), {BF16})
    assert result.isfinite().all()


# --- Behaviour ---


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
@pytest.mark.parametrize("width", [96, 136])
def test_the_same_bits_again(op, width, tokens):
    case = gpu_case(op, tokens, width=width, experts=32, top_k=4, dtype=BF16)
    first = case()
    assert all(torch.equal(case(), first) for _ in range(20))


def test_the_same_bits_beside_other_work():
    case = gpu_case("dropless", LARGE, width=512, hidden=256, experts=32, top_k=4, dtype=BF16)
    first = case()
    torch.cuda.synchronize()
    busy, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(busy):
            for _ in range(4):
                square = (square @ square).clamp(-1, 1)
        result = case()
        torch.cuda.current_stream().synchronize()
        assert torch.equal(result, first)
    torch.cuda.synchronize()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [1, FEW, SMALL, LARGE])
@pytest.mark.parametrize("width", [96, 136])
def test_a_graph_computes_on_new_inputs(op, width, tokens):
    case = gpu_case(op, tokens, width=width, dtype=BF16)
    other = gpu_case(op, tokens, width=width, dtype=BF16, seed=1)
    expected = case.changed(**other.floats, **_ids(other))()
    case()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = case()
    for _ in range(2):
        for name, value in (other.floats | _ids(other)).items():
            case.arguments[name].copy_(value)
        result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def _ids(case: Case) -> dict[str, torch.Tensor]:
    return {name: case.arguments[name] for name in ("expert_ids",) if name in case.arguments}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [FEW, SMALL, LARGE])
def test_the_host_waits_for_nothing(op, tokens):
    case = gpu_case(op, tokens, dtype=BF16)
    case()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("weights", [(), ("w2",)])
def test_weights_that_were_written_just_before(weights):
    """The second kernel reads its first weights before the first one has ended."""
    case = in_out(gpu_case("experts", FEW, width=1024, hidden=1024, dtype=BF16), *weights)
    w2 = case.arguments["w2"]
    versions = [w2 * scale for scale in (1, -1, 2, -2)]
    expected = []
    for version in versions:
        w2.copy_(version)
        torch.cuda.synchronize()
        expected.append(case())
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for version in versions:
            w2.copy_(version)
            results.append(case())
    torch.cuda.synchronize()
    for result, right in zip(results, expected * 10, strict=True):
        assert torch.equal(result, right)


def test_streams_at_once():
    cases = [gpu_case("dropless", tokens, dtype=BF16) for tokens in (2, 40, 300, 1500)]
    expected = [case() for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(10):
        results = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append(case())
        torch.cuda.synchronize()
        for actual, right in zip(results, expected, strict=True):
            assert torch.equal(actual, right)


# --- The backward pass ---


def check_gradients(case: Case, dtypes: set[torch.dtype] = frozenset()) -> None:
    """Compares the gradients with those of the oracle, and again with themselves."""
    actual, again = gpu_cases.gradients(case), gpu_cases.gradients(case)
    for name, expected in gpu_cases.gradients(case, Case.oracle).items():
        assert_matches(actual[name], expected.double(), set(dtypes) or case.dtypes, name)
        assert torch.equal(actual[name], again[name])
        if actual[name].ndim == 3:
            assert actual[name].stride() == case.arguments[name].stride()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [0, 1, FEW, 200, LARGE])
@pytest.mark.parametrize(("tokens_dtype", "experts_dtype", "tf32"), DTYPES)
def test_gradients(op, tokens, tokens_dtype, experts_dtype, tf32):
    case = gpu_case(op, tokens, x_dtype=tokens_dtype, dtype=experts_dtype, **GATED)
    with allow_tf32(allowed=tf32):
        check_gradients(case, {FP16} if tf32 else set())


@pytest.mark.parametrize("weight_on_input", [True, False])
@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_gradients_of_forms_of_experts(form, weight_on_input):
    check_gradients(gpu_case("experts", 200, weight_on_input=weight_on_input, **form))


@pytest.mark.parametrize("weight_on_input", [True, False])
@pytest.mark.parametrize("norm", NORM_FORMS)
def test_gradients_of_norm_and_residual(norm, weight_on_input):
    check_gradients(gpu_case("experts", 200, weight_on_input=weight_on_input, **GATED, **norm))


@pytest.mark.parametrize("expert", [-1, 5])
@pytest.mark.parametrize("tokens", [FEW, LARGE])
def test_gradients_of_unusual_routing(tokens, expert):
    case = routed(tokens, torch.full((tokens, 2), expert), experts=64)
    check_gradients(case)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_of_weights_that_lie_as_in_out(dtype):
    case = gpu_case("experts", 200, dtype=dtype, **GATED)
    check_gradients(in_out(case, "w1", "w2"))


def test_gradients_after_a_near_tie():
    x, router = torch.zeros(1, 8), torch.zeros(2, 8)
    x[0, :2] = torch.tensor([1.0, 2.0**-30])
    router[:, 0] = 1
    router[1, 1] = 1  # In float64 the second expert's logit is larger.
    case = gpu_case("dropless", 1, width=8, hidden=8, experts=2, top_k=1, biases=False)
    case = case.changed(x=x.cuda(), router_weight=router.cuda())
    w1 = gpu_cases.gradients(case)["w1"]
    assert w1[0].any()
    assert not w1[1].any()


def _step(case: Case) -> list[torch.Tensor]:
    return list(torch.autograd.grad(case().square().sum(), list(case.floats.values())))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [FEW, LARGE])
def test_the_host_waits_for_nothing_in_training(op, tokens):
    case = gpu_case(op, tokens, dtype=BF16, **GATED).with_grad()
    _step(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [FEW, LARGE])
def test_a_graph_of_a_training_step(op, tokens):
    case = gpu_case(op, tokens, dtype=BF16, **GATED).with_grad()
    other = gpu_case(op, tokens, dtype=BF16, seed=1, **GATED)
    expected = _step(case.changed(**other.floats, **_ids(other)).with_grad())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _step(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = _step(case)
    for name, value in (other.floats | _ids(other)).items():
        case.arguments[name].data.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    for gradient, right in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, right)


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    case = gpu_case(op, 20, width=32, hidden=16).with_grad()
    torch.library.opcheck(case.overload, tuple(case.arguments.values()), case.options)


@pytest.mark.parametrize("op", OPS)
def test_a_compiled_model_has_the_same_bits(op):
    case = gpu_case(op, SMALL, dtype=BF16)
    compiled = torch.compile(case.function, fullgraph=True)
    assert torch.equal(compiled(*case.floats.values()), case())


# --- Experts in host memory ---


def offloaded(case: Case, resident: int) -> Case:
    """The case with both weights in pinned memory, and so many slots on the device."""
    host = {name: case.arguments[name].cpu().pin_memory() for name in ("w1", "w2")}
    offload_experts(host["w1"], host["w2"], resident, torch.device("cuda"))
    return case.changed(**host)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [1, FEW, SMALL, LARGE])
@pytest.mark.parametrize("width", [96, 136])
@pytest.mark.parametrize("resident", [1, 3, 8])
def test_experts_in_host_memory_give_the_same_bits(op, tokens, width, resident):
    case = gpu_case(op, tokens, width=width, dtype=BF16, **GATED)
    from_host = offloaded(case, resident)
    expected = case()
    for _ in range(3):
        assert torch.equal(from_host(), expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("weights", LAYOUTS)
def test_experts_in_host_memory_that_lie_as_in_out(weights):
    for tokens in (FEW, SMALL, LARGE):
        case = in_out(gpu_case("experts", tokens, dtype=BF16, **GATED), *weights)
        assert torch.equal(offloaded(case, 3)(), case())
    torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, SMALL])
@pytest.mark.parametrize("resident", [1, 3])
def test_a_graph_copies_the_experts_of_new_inputs(tokens, resident):
    case = gpu_case("experts", tokens, width=256, hidden=512, experts=32, dtype=BF16, **GATED)
    from_host = offloaded(case, resident)
    from_host()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = from_host()
    for _ in range(20):
        ids = torch.randint(32, case.arguments["expert_ids"].shape, device="cuda")
        case.arguments["expert_ids"].copy_(ids)
        expected = case()
        result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def test_a_cache_follows_its_calls_from_stream_to_stream():
    case = gpu_case("dropless", SMALL, width=512, hidden=512, experts=32, dtype=BF16, **GATED)
    from_host, expected = offloaded(case, 3), case()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for turn in range(30):
        with torch.cuda.stream(streams[turn % 3]):
            results.append(from_host())
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in results)


def test_experts_in_host_memory_need_not_be_waited_for():
    from_host = offloaded(gpu_case("dropless", SMALL, dtype=BF16), 2)
    from_host()
    torch.cuda.set_sync_debug_mode("error")
    try:
        from_host()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_experts_in_memory_that_cuda_cannot_read_are_refused():
    case = gpu_case("experts", SMALL, dtype=BF16)
    host = {name: case.arguments[name].cpu() for name in ("w1", "w2")}
    with pytest.raises(ValueError, match="host memory that the device cannot read"):
        case.changed(**host)()


@pytest.mark.parametrize("op", OPS)
def test_experts_in_host_memory_have_no_gradients_on_cuda(op):
    case = offloaded(gpu_case(op, SMALL, dtype=BF16), 2)
    case.arguments["x"].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradients"):
        case()
