"""State-space models and linear attention of transformers, at every length.

Their code for PyTorch loops over tokens, or over chunks of them, and a trace unrolls a loop for the
example's length. Here a recurrence is one ONNX Scan, and what a loop only splits is one block.

Legend: B batch, L length, C channels, N size of a channel's state, H heads, K and V widths of a
head's keys and values.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_moe.private import tracer
from dynamo_moe.process_state import replaced
from dynamo_moe.tracing.token_blocks import COMPRESSORS

_MODELS = "transformers.models."
_NO_LIMITS = (0.0, float("inf"))
# What transformers calls a cache: the first from 5.24 on.
_CACHES = ("cache", "past_key_values", "cache_params")


@contextmanager
def exportable_recurrences() -> Iterator[None]:
    """Replaces the loops and the compressors of transformers' models that are loaded.

    Without PyTorch's ``scan``, loops are the models' own, whose length is the example's.
    """
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(_MODELS)]
    changes = COMPRESSORS if tracer.scan is None else {**_REPLACEMENTS, **COMPRESSORS}
    classes = set()  # One may have its name in several modules.
    with ExitStack() as stack:
        for module in modules:
            for name in changes.keys() & vars(module).keys():
                change = changes[name]
                if isinstance(vars(module)[name], type):
                    classes.add((vars(module)[name], change))
                else:
                    stack.enter_context(replaced(module, name, change))
        for own_class, change in classes:
            stack.enter_context(replaced(own_class, "forward", change))
        yield


def _selective_scan(
    u_BCL: Tensor,
    dt_BCL: Tensor,
    A_CN: Tensor,
    B_BNL: Tensor,
    C_BNL: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: Tensor | None = None,
    **_: Any,
) -> Any:
    """The recurrence of Mamba (https://arxiv.org/abs/2312.00752, equation 2).

    ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t`` and ``y_t = C_t h_t + D u_t``, times ``silu(z)``.
    It begins with ``initial_state`` ``[B, C, N]``, or zeros.

    Returns:
        ``[B, C, L]``; with ``return_last_state`` also the last ``h``, ``[B, C, N]``.
    """
    dtype = u_BCL.dtype
    if delta_bias is not None:
        dt_BCL = dt_BCL + delta_bias.to(dt_BCL.dtype)[..., None]
    if delta_softplus:
        dt_BCL = F.softplus(dt_BCL)
    dt_LBC1, u_LBC1 = (value.permute(2, 0, 1)[..., None] for value in (dt_BCL, u_BCL.float()))
    B_LB1N, C_LB1N = (value.permute(2, 0, 1)[:, :, None].float() for value in (B_BNL, C_BNL))
    decay_LBCN = torch.exp(A_CN * dt_LBC1)
    update_LBCN = dt_LBC1 * B_LB1N * u_LBC1

    def step(h: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        decay, update = inputs
        h = decay * h + update
        return h, h.clone()

    start = torch.zeros_like(update_LBCN[0]) if initial_state is None else initial_state.float()
    last, h_LBCN = tracer.scan(step, start, (decay_LBCN, update_LBCN))
    y = (h_LBCN.to(dtype) * C_LB1N.to(dtype)).sum(-1).permute(1, 2, 0)
    if D is not None:
        y = y + u_BCL * D[None, :, None]
    if z is not None:
        y = y * F.silu(z)
    return (y, last) if return_last_state else y


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence of gated delta networks (https://arxiv.org/abs/2412.06464, equation 10).

    ``S_t = a_t S_{t-1} + k_t (b_t (v_t - (a_t S_{t-1})^T k_t))^T`` with ``a_t = exp(g_t)``, and
    ``o_t = S_t^T q_t / sqrt(K)``, in float32. Kimi's (https://arxiv.org/abs/2510.26692) decays each
    row of S by itself.

    Args:
        query: ``[B, L, H', K]``; each of its heads serves the same number of neighbouring values'.
        key: ``[B, L, H', K]``.
        value: ``[B, L, H, V]``.
        g: Logarithms of decays ``[B, L, H]``, or ``[B, L, H, K]``.
        beta: ``[B, L, H]``.
        chunk_size: Of no consequence for the result.
        initial_state: ``[B, H, K, V]``; None: zeros.
        output_final_state: Whether the last state is returned.
        use_qk_l2norm_in_kernel: Whether rows of query and key are divided by their length.

    Returns:
        ``[B, L, H, V]`` in query's dtype, and the last state ``[B, H, K, V]`` in float32 or None.
    """
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    query, key, value, g, beta = (t.float().transpose(0, 1) for t in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (
            t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (query, key)
        )
    query = query * query.shape[-1] ** -0.5
    if groups > 1:
        query, key = (t.repeat_interleave(groups, dim=2) for t in (query, key))
    decay_LBHK1 = (g if g.ndim == 4 else g[..., None]).exp()[..., None]
    q_LBHK1, k_LBHK1 = query[..., None], key[..., None]
    v_LBH1V, beta_LBH11 = value[..., None, :], beta[..., None, None]

    def step(S: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, v, decay, beta = inputs
        S = S * decay
        # Sums, since a product of matrices would name the batch, which a Scan's body may not.
        S = S + k * ((v - (S * k).sum(-2, keepdim=True)) * beta)
        return S, (S * q).sum(-2)

    if initial_state is None:
        start = key.new_zeros(*key.shape[1:], value.shape[-1])
    else:
        start = initial_state.float()
    inputs = (q_LBHK1, k_LBHK1, v_LBH1V, decay_LBHK1, beta_LBH11)
    last, o_LBHV = tracer.scan(step, start, inputs)
    return o_LBHV.transpose(0, 1).to(dtype), last if output_final_state else None


def _cache_among(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the cache that a forward gets, whatever transformers' version calls it."""
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    given = bound | bound.get("kwargs", {})
    return next((given[name] for name in _CACHES if given.get(name) is not None), None)


def _going_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets Jamba's mixer of several tokens begin with the state in its cache, not with zeros."""

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        number: Any = self.layer_idx
        cache = _cache_among(original, self, *args, **kwargs)
        state = None if cache is None else cache.get_recurrent_state(number)
        scan = partial(_selective_scan, initial_state=state)
        with replaced(sys.modules[type(self).__module__], "mamba_selective_scan", _instead(scan)):
            return original(self, *args, **kwargs)

    return forward


def _unlimited_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets Mamba-2's chunks limit time steps in prompts alone.

    transformers' form for one token and a state, which a trace of several does not have, has no
    limits.
    """

    @wraps(original)
    def scan(
        hidden_states: Tensor,
        dt_BLH: Tensor,
        *args: Any,
        initial_states: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = _NO_LIMITS,
        **kwargs: Any,
    ) -> Any:
        length = dt_BLH.shape[1]
        is_step_too = initial_states is not None and isinstance(length, torch.SymInt)
        if is_step_too and tuple(dt_limit) != _NO_LIMITS:
            if dt_bias is not None:
                dt_BLH = dt_BLH + dt_bias.to(dt_BLH.dtype)
            if dt_softplus:
                dt_BLH = F.softplus(dt_BLH)
            is_prompt = torch.arange(length, device=dt_BLH.device)[-1] > 0
            dt_BLH = torch.where(is_prompt, dt_BLH.clamp(*dt_limit), dt_BLH)
            dt_bias, dt_softplus, dt_limit = None, False, _NO_LIMITS
        options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        return original(
            hidden_states, dt_BLH, *args, initial_states=initial_states, **options, **kwargs
        )

    return scan


def _lightning_attention(
    qkv_BLHW: Tensor, slope_H11: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Lightning attention (https://arxiv.org/abs/2401.04658) of all tokens as one block.

    ``S_t = exp(-slope) S_{t-1} + k_t v_t^T`` and ``o_t = S_t^T q_t``.

    Args:
        qkv_BLHW: Queries, keys and values beside each other in the last axis.
        slope_H11: By how much a head forgets with each token.
        initial_state: ``S_0``, ``[B, H, W/3, W/3]``; None: zeros.

    Returns:
        ``o`` ``[B, L, H, W/3]``, and the last ``S``.
    """
    q_BHLK, k_BHLK, v_BHLV = qkv_BLHW.transpose(1, 2).chunk(3, dim=-1)
    age_L = torch.arange(qkv_BLHW.shape[1], device=qkv_BLHW.device)
    distance_LL = age_L[:, None] - age_L
    decay_HLL = torch.exp(-slope_H11 * distance_LL.clamp(min=0)) * (distance_LL >= 0)
    o_BHLV = (q_BHLK @ k_BHLK.transpose(-1, -2) * decay_HLL) @ v_BHLV
    remaining_HL1 = torch.exp(-slope_H11 * age_L.flip(0)[:, None])
    last_BHKV = (k_BHLK * remaining_HL1).transpose(-1, -2) @ v_BHLV
    if initial_state is not None:
        remaining_HL1 = torch.exp(-slope_H11 * (age_L + 1)[:, None])
        o_BHLV = o_BHLV + (q_BHLK * remaining_HL1) @ initial_state
        last_BHKV = last_BHKV + remaining_HL1[:, -1:] * initial_state
    return o_BHLV.transpose(1, 2), last_BHKV


def _in_one_block(original: Callable[..., Any]) -> Callable[..., Any]:
    """Computes MiniMax's layer of lightning attention without its loops over blocks and tokens."""

    @wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        arguments = self, hidden_states, position_embeddings, attention_mask, *args
        if not isinstance(hidden_states.shape[1], torch.SymInt):
            return original(*arguments, **kwargs)  # type: ignore[no-any-return]
        number = self.layer_idx
        cache = _cache_among(original, *arguments, **kwargs)
        state = None if cache is None else cache.get_linear_cache(number)
        qkv = self.act_fn(self.qkv_proj(hidden_states))
        if attention_mask is not None:
            qkv = qkv * attention_mask[..., None].to(qkv.dtype)
        qkv = qkv.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim))
        attended, state = _lightning_attention(qkv, self.slope_rate, state)
        gate = self.output_gate(hidden_states).sigmoid()
        if cache is not None:
            cache.set_linear_cache(number, state)
        return self.out_proj(gate * self.norm(attended.flatten(-2))), state

    return forward


def _delta_rule_or(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves chunks as they are where the length is a number: in runs, and for a fixed length."""

    @wraps(original)
    def rule(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        symbolic = isinstance(query.shape[1], torch.SymInt)
        return (_delta_rule if symbolic else original)(query, *args, **kwargs)

    return rule


def _instead(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda _: function


# By the name of a function, or of a class whose forward it is. Mamba's is never left to the model:
# its loop is over tokens, not over chunks, so that even a fixed length is hundreds of turns.
_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "mamba_selective_scan": _instead(_selective_scan),
    "mamba2_chunk_scan": _unlimited_steps,
    "torch_chunk_gated_delta_rule": _delta_rule_or,
    "chunk_kimi_delta_attention": _delta_rule_or,
    "JambaMambaMixer": _going_on,
    "MiniMaxLightningAttention": _in_one_block,
}
