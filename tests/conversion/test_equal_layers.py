"""Layers that look like one before them are proved by less, and what differs is still found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor, nn

import dynamo_moe
from dynamo_moe.conversion import convert_layers, transformers_experts
from dynamo_moe.models import DroplessMoEMlp
from dynamo_moe.modules import ConvertedModule

WIDTH = 8
LAYERS, MANY = 3, 5
# Many tokens of two scales, one of the first, and one of a third; with random and own weights.
COMPARISONS = 6
# A whole proof calls a layer 38 times.
CALLS_OF_A_PROOF = 39
SETTINGS: dict[Any, Any] = {}
CALLS = 0


class Layer(DroplessMoEMlp):
    """Computes something else for few tokens or many where ``drops`` says so."""

    least, most = 1, 1  # So that a comparison on many tokens does not show it.

    def __init__(self) -> None:
        super().__init__(WIDTH, 16, num_experts=4, top_k=2)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        within = self.least <= x.shape[:-1].numel() <= self.most
        return y * 0.5 if self.drops() and within else y

    def drops(self) -> bool:
        return False


class Limits(NamedTuple):
    drops: bool = False


class ByNamedTuple(Layer):
    def drops(self) -> bool:
        return Limits().drops


class ByConstant(Layer):
    limit = 1

    def drops(self) -> bool:
        return self.limit > 1


class ByNestedConstant(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"limits": [1, 1]}

    def drops(self) -> bool:
        return bool(self.config["limits"][1] > 1)


class ByClosure(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.condition = condition(1)

    def drops(self) -> bool:
        return self.condition()


class ByBuffer(Layer):
    limit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.tensor(1))

    def drops(self) -> bool:
        return bool(self.limit > 1)


class ByWeights(Layer):
    least, most = 100, 1000

    def drops(self) -> bool:
        return bool(self.b2.sum() > 100)


class ByWeightsOfOneToken(Layer):
    """Differs for a single token that is not small."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        single = x.shape[:-1].numel() == 1 and x.abs().max() > 0.1
        return y * 0.5 if single and self.b2.sum() > 100 else y


class ByHiddenBias(Layer):
    """Differs in what a bias of zeros hides, by a dictionary of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"adds": False}
        nn.init.zeros_(self.b2)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y + self.b2.sum() if self.config["adds"] else y


class ByScale(DroplessMoEMlp):
    """Clamps its tokens to a limit that has been learned."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 16, num_experts=4, top_k=2)
        self.limit = nn.Parameter(torch.tensor(1e6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.minimum(torch.maximum(x, -self.limit), self.limit))


class ByRegistry(Layer):
    """Finds out what is said of it elsewhere."""

    least, most = 1, 1000

    def drops(self) -> bool:
        return bool(SETTINGS.get(self))


class ByGlobal(Layer):
    """Changes a global object once it has been proved."""

    def drops(self) -> bool:
        SETTINGS["calls"] = SETTINGS.get("calls", 0) + 1
        return bool(SETTINGS["calls"] > CALLS_OF_A_PROOF)


class ByGlobalName(Layer):
    def drops(self) -> bool:
        global CALLS  # noqa: PLW0603  What is tested.
        CALLS += 1
        return CALLS > CALLS_OF_A_PROOF


class ByClass(Layer):
    calls = 0

    def drops(self) -> bool:
        ByClass.calls += 1
        return self.calls > CALLS_OF_A_PROOF


class WithLoss(Layer):
    loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.loss = y.square().mean()
        return y


class Hooked(Layer):
    """Has a part that its forward runs, whose hooks would not run."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        _, weights, ids = self._route(flat)
        result = torch.zeros_like(flat)
        for expert in range(self.w1.shape[0]):
            token, slot = torch.where(ids == expert)
            hidden = self.activation(flat[token] @ self.w1[expert] + self.b1[expert])
            y = (hidden @ self.w2[expert] + self.b2[expert]) * weights[token, slot, None]
            result = result.index_add(0, token, y.to(x.dtype))
        return result.reshape(x.shape)


def condition(limit: int) -> Callable[[], bool]:
    return lambda: limit > 1


def set_limit(layer: Any) -> None:
    layer.limit = 2


def set_nested_limit(layer: Any) -> None:
    layer.config["limits"][1] = 2


def set_condition(layer: Any) -> None:
    layer.condition = condition(2)


def add_bias(layer: Any) -> None:
    layer.config["adds"] = True


def fill_buffer(layer: Any) -> None:
    layer.limit.fill_(2)


def fill_weights(layer: Any) -> None:
    nn.init.constant_(layer.b2, 10.0)


def lower_limit(layer: Any) -> None:
    nn.init.constant_(layer.limit, 10.0)


def register(layer: Any) -> None:
    SETTINGS[layer] = True


def hook(layer: Any) -> None:
    layer.activation.register_forward_hook(lambda *args: args[-1] * 2)


def spoil(layer: Any) -> None:
    nn.init.constant_(layer.w1[2, 0], float("nan"))


def store_transposed(layer: Any) -> None:
    layer.w1 = nn.Parameter(layer.w1.detach().mT.contiguous().mT)


def choose_one(layer: Any) -> None:
    layer.top_k = 1


@pytest.fixture
def short_proofs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The comparisons that were enough for a layer."""
    seen: list[Any] = []
    original = convert_layers.compare

    def counted(*args: Any) -> None:
        original(*args)
        seen.append(args)

    monkeypatch.setattr(convert_layers, "compare", counted)
    return seen


def model_of(kind: Callable[[], nn.Module], layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(layers))).eval()


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [Layer, ByConstant, ByNamedTuple, ByBuffer, ByWeights, Hooked])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_layers_take_one_whole_proof(
    kind: Callable[[], nn.Module], dtype: torch.dtype, short_proofs: list[Any]
) -> None:
    model = model_of(kind).to(dtype)
    x = torch.randn(3, 70, WIDTH, dtype=dtype)
    expected = model(x)
    assert len(dynamo_moe.convert(model).replaced) == LAYERS
    assert len(short_proofs) == COMPARISONS * (LAYERS - 1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(model(x), expected, rtol=tolerance, atol=tolerance)


def test_equal_layers_without_weights_take_one_whole_proof(short_proofs: list[Any]) -> None:
    with torch.device("meta"):
        model = model_of(Layer)
    report = dynamo_moe.convert(model)
    assert [each.compared for each in report.replaced] == [False] * LAYERS
    assert len(short_proofs) == COMPARISONS // 2 * (LAYERS - 1)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (ByConstant, set_limit),
        (ByNestedConstant, set_nested_limit),
        (ByClosure, set_condition),
        (ByBuffer, fill_buffer),
        (ByWeights, fill_weights),
        (ByWeightsOfOneToken, fill_weights),
        (ByHiddenBias, add_bias),
        (ByScale, lower_limit),
        (ByRegistry, register),
        (Hooked, hook),
    ],
)
def test_a_layer_that_differs_is_refused(
    kind: Callable[[], nn.Module], change: Callable[[Any], None]
) -> None:
    SETTINGS.clear()
    model = model_of(kind)
    change(model[1])
    inputs = [torch.randn(*shape, WIDTH) for shape in ((3, 70), (1,))]
    expected = [model(x) for x in inputs]
    report = dynamo_moe.convert(model)
    assert [each.module for each in report.replaced] == ["0", "2"]
    assert [each.module for each in report.unrecognised] == ["1"]
    torch.testing.assert_close([model(x) for x in inputs], expected)


@pytest.mark.each_value
@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize(
    ("kind", "change"),
    [(ByConstant, set_limit), (ByWeights, fill_weights), (Layer, spoil), (Hooked, hook)],
)
def test_one_of_many_layers_that_differs_is_refused(
    kind: Callable[[], nn.Module], change: Callable[[Any], None], place: int
) -> None:
    model = model_of(kind, MANY)
    change(model[place])
    report = dynamo_moe.convert(model)
    assert [each.module for each in report.unrecognised] == [str(place)]
    assert len(report.replaced) == MANY - 1


@pytest.mark.each_value
@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("change", [choose_one, store_transposed])
def test_one_of_many_layers_that_differs_is_converted_as_what_it_is(
    change: Callable[[Any], None], place: int
) -> None:
    model = model_of(Layer, MANY)
    change(model[place])
    x = torch.randn(3, 70, WIDTH)
    expected = [layer(x) for layer in model]
    assert len(dynamo_moe.convert(model).replaced) == MANY
    torch.testing.assert_close([layer(x) for layer in model], expected)


def test_trials_of_small_layers_have_one_thread() -> None:
    ran = Mock()  # The conversion restores plain containers.

    class Counting(Layer):
        def forward(self, x: Tensor) -> Any:
            ran(torch.get_num_threads())
            return super().forward(x)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert len(dynamo_moe.convert(model_of(Counting)).replaced) == LAYERS
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert {call.args for call in ran.call_args_list} == {(1,)}


def language_model() -> Any:
    config = transformers.MixtralConfig(
        vocab_size=16,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=MANY,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).eval()


@pytest.fixture
def short_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The experts of transformers of which it was enough to compare one."""
    seen: list[Any] = []
    original = transformers_experts._compare_last

    def counted(module: Any, known: Any) -> None:
        original(module, known)
        seen.append(module)

    monkeypatch.setattr(transformers_experts, "_compare_last", counted)
    return seen


def test_equal_experts_of_transformers_are_compared_in_full_once(
    short_comparisons: list[Any],
) -> None:
    model = language_model()
    assert len(dynamo_moe.convert(model).replaced) == MANY
    assert short_comparisons == [layer.mlp.experts for layer in model.model.layers[1:]]


class OtherActivation(nn.SiLU):
    """Differs for large numbers alone, which experts with their own small weights do not give."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(max=100.0)


class Scaled(nn.SiLU):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def spoil_last(experts: Any) -> None:
    nn.init.constant_(experts.down_proj[-1, 1], float("nan"))


def clamp_activation(experts: Any) -> None:
    experts.act_fn = OtherActivation()


def scale_activation(experts: Any) -> None:
    experts.act_fn.scale = 1.5


def hook_experts(experts: Any) -> None:
    experts.register_forward_hook(lambda *args: args[-1] * 2)


def hook_activation(experts: Any) -> None:
    experts.act_fn.register_forward_hook(lambda *args: args[-1] * 2)


@pytest.mark.each_value
@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize(
    "change", [spoil_last, clamp_activation, scale_activation, hook_experts, hook_activation]
)
def test_experts_of_transformers_that_differ_are_left_as_they_are(
    change: Callable[[Any], None], place: int
) -> None:
    model = language_model()
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = Scaled()
    change(model.model.layers[place].mlp.experts)
    report = dynamo_moe.convert(model)
    assert [each.module for each in report.unrecognised] == [f"model.layers.{place}.mlp.experts"]
    assert len(report.replaced) == MANY - 1


def test_a_spoilt_expert_of_transformers_stays_what_it_is() -> None:
    model = language_model()
    experts = model.model.layers[2].mlp.experts
    nn.init.constant_(experts.down_proj[2, 1], float("nan"))
    x = torch.randn(8, WIDTH)
    ids, weights = torch.arange(8).reshape(-1, 1) % 4, torch.ones(8, 1)
    expected = experts(x, ids, weights)
    assert not dynamo_moe.convert(model).unrecognised
    result = experts(x, ids, weights)
    assert result.isnan().any()
    torch.testing.assert_close(result, expected, equal_nan=True)


@transformers.integrations.use_experts_implementation
class ExpertsWithScales(nn.Module):
    """Experts of anybody's, with one factor each beside what they are in transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.gate_up_proj = nn.Parameter(torch.randn(6, 32, WIDTH) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(6, WIDTH, 16) * 0.2)
        self.scales = nn.Parameter(torch.ones(6))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(6):
            rows, choices = torch.where(ids == expert)
            gate, up = (x[rows] @ self.gate_up_proj[expert].T).chunk(2, -1)
            out = (self.act_fn(gate) * up) @ self.down_proj[expert].T
            y.index_add_(0, rows, out * weights[rows, choices, None] * self.scales[expert])
        return y


class RoutedExperts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 6)
        self.experts = ExpertsWithScales(config)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, ids, weights)


def test_other_parameters_of_experts_are_compared() -> None:
    options: Any = {"experts_implementation": "eager"}
    config = transformers.MixtralConfig(**options)
    model = model_of(lambda: RoutedExperts(config))
    nn.init.constant_(model[1].experts.scales[2:3], 3.0)
    x = torch.randn(64, WIDTH)
    expected = model(x)
    report = dynamo_moe.convert(model)
    assert [each.module for each in report.replaced] == ["0.experts", "2.experts"]
    torch.testing.assert_close(model(x), expected)


def test_a_layer_that_differs_may_be_converted_by_its_own_proof(short_proofs: list[Any]) -> None:
    model = model_of(Layer)
    choose_one(model[1])
    x = torch.randn(3, 70, WIDTH)
    expected = model(x)
    assert len(dynamo_moe.convert(model).replaced) == LAYERS
    assert not short_proofs
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("kind", [ByGlobal, ByGlobalName, ByClass])
def test_state_that_changes_from_call_to_call(kind: Callable[[], nn.Module]) -> None:
    global CALLS  # noqa: PLW0603  The layers count in it.
    SETTINGS.clear()
    CALLS = ByClass.calls = 0
    model = model_of(kind)
    report = dynamo_moe.convert(model)
    # The last one is converted first, before the state changes what is computed.
    assert [each.module for each in report.replaced] == ["2"]
    assert [each.module for each in report.unrecognised] == ["0", "1"]


def check_all_converted(model: nn.Sequential) -> None:
    """The layers are converted, and give the numbers that they gave before."""
    x = torch.randn(3, 70, WIDTH)
    expected = [layer(x) for layer in model]
    assert len(dynamo_moe.convert(model).replaced) == LAYERS
    torch.testing.assert_close([layer(x) for layer in model], expected)


def test_tied_weights() -> None:
    model = model_of(Layer)
    model[2].b2 = model[1].b2 = model[0].b2
    check_all_converted(model)


def test_closures_of_their_own() -> None:
    check_all_converted(model_of(ByClosure))


def test_objects_that_cannot_be_read() -> None:
    class Unreadable(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("not for you")

    shared = Unreadable()
    model = model_of(Layer)
    for layer in model:
        layer.shared = shared
    check_all_converted(model)


def test_attributes_that_the_forward_set_are_each_layers_own() -> None:
    model = model_of(WithLoss)
    report = dynamo_moe.convert(model)
    assert [each.notes for each in report.replaced] == [("loss stays 0",)] * LAYERS
    losses = [layer.loss for layer in model]
    assert losses == [0.0] * LAYERS
    assert len({id(loss) for loss in losses}) == LAYERS


def test_converted_layers_are_those_of_a_model_alone() -> None:
    model = model_of(Layer)
    alone = copy.deepcopy(model[2])
    dynamo_moe.convert(model)
    dynamo_moe.convert(alone)
    assert isinstance(model[2], ConvertedModule)
    assert vars(model[2])["_dynamo_moe_spec"] == vars(alone)["_dynamo_moe_spec"]
    x = torch.randn(5, WIDTH)
    assert torch.equal(model[2](x), alone(x))
