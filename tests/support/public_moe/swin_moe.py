"""A whole Swin-MoE as in Microsoft's Swin Transformer, but tiny.

Legend: B batch, C channels, N tokens of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from public_moe.surroundings import Case
from public_moe.tutel import CosineTopKGate, FusedExpertsNetwork, LinearTopKGate, MOELayer

IMAGE, PATCH, CHANNELS, WIDTH, EXPERTS = 16, 2, 3, 32, 4
# 512 in the original; with random weights of that width, attention would see one key per query.
POSITION_HIDDEN = 16


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class MoEMlp(nn.Module):
    """Its experts' activation is a function that accesses this module's dropout."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_local_experts: int,
        top_value: int,
        capacity_factor: float,
        cosine_router: bool,
        normalize_gate: bool,
        use_bpr: bool,
    ) -> None:
        super().__init__()
        self.in_features, self.hidden_features = in_features, hidden_features
        self.num_local_experts, self.top_value = num_local_experts, top_value
        self.capacity_factor, self.cosine_router = capacity_factor, cosine_router
        self.normalize_gate, self.use_bpr = normalize_gate, use_bpr
        self._dropout = nn.Dropout(p=0.1)
        kind = CosineTopKGate if cosine_router else LinearTopKGate
        self._moe_layer = MOELayer(
            kind(in_features, num_local_experts, top_value, fp32_gate=True),
            FusedExpertsNetwork(
                in_features,
                hidden_features,
                num_local_experts,
                activation_fn=lambda x: self._dropout(F.gelu(x)),
            ),
            capacity_factor=capacity_factor,
            batch_prioritized_routing=use_bpr,
            normalize_gate=normalize_gate,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self._moe_layer(x)
        return x, x.l_aux


def window_partition(x: Tensor, window_size: int) -> Tensor:
    B, H, W, C = x.shape
    x = x.view(B, H // window_size, window_size, W // window_size, window_size, C)
    x = x.permute(0, 1, 3, 2, 4, 5).contiguous()
    return x.view(-1, window_size, window_size, C)


def window_reverse(windows: Tensor, window_size: int, H: int, W: int) -> Tensor:
    B = int(windows.shape[0] / (H * W / window_size / window_size))
    x = windows.view(B, H // window_size, W // window_size, window_size, window_size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class WindowAttention(nn.Module):
    """A small network computes its position bias from logarithmic distances."""

    def __init__(self, dim: int, window_size: tuple[int, int], num_heads: int) -> None:
        super().__init__()
        self.dim, self.window_size, self.num_heads = dim, window_size, num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, POSITION_HIDDEN, bias=True),
            nn.ReLU(inplace=True),
            nn.Linear(POSITION_HIDDEN, num_heads, bias=False),
        )
        height, width = window_size
        rows = torch.arange(-(height - 1), height, dtype=torch.float32)
        columns = torch.arange(-(width - 1), width, dtype=torch.float32)
        table = torch.stack(torch.meshgrid([rows, columns], indexing="ij"))
        table = table.permute(1, 2, 0).contiguous().unsqueeze(0)
        table[:, :, :, 0] /= height - 1
        table[:, :, :, 1] /= width - 1
        table *= 8
        table = torch.sign(table) * torch.log2(torch.abs(table) + 1.0) / np.log2(8)
        self.register_buffer("relative_coords_table", table)
        grid = torch.meshgrid([torch.arange(height), torch.arange(width)], indexing="ij")
        flat = torch.flatten(torch.stack(grid), 1)
        distance = (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0).contiguous()
        distance[:, :, 0] += height - 1
        distance[:, :, 1] += width - 1
        distance[:, :, 0] *= 2 * width - 1
        self.register_buffer("relative_position_index", distance.sum(-1))
        self.qkv = nn.Linear(dim, dim * 3)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        area = self.window_size[0] * self.window_size[1]
        bias = table[self.relative_position_index.view(-1)].view(area, area, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            windows = mask.shape[0]
            attn = attn.view(B_ // windows, windows, self.num_heads, N, N)
            attn = attn + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        attn = self.attn_drop(self.softmax(attn))
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj_drop(self.proj(x))


class SwinTransformerBlock(nn.Module):
    """Returns a tensor, or a tuple with the loss."""

    def __init__(
        self,
        dim: int,
        input_resolution: tuple[int, int],
        num_heads: int,
        window_size: int,
        shift_size: int,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.dim, self.input_resolution, self.num_heads = dim, input_resolution, num_heads
        self.window_size, self.shift_size = window_size, shift_size
        if min(input_resolution) <= window_size:
            self.shift_size, self.window_size = 0, min(input_resolution)
        self.is_moe = isinstance(mlp, MoEMlp)
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, (self.window_size, self.window_size), num_heads)
        self.drop_path = nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = mlp
        self.register_buffer("attn_mask", self._mask() if self.shift_size > 0 else None)

    def _mask(self) -> Tensor:
        H, W = self.input_resolution
        image = torch.zeros((1, H, W, 1))
        cuts = (
            slice(0, -self.window_size),
            slice(-self.window_size, -self.shift_size),
            slice(-self.shift_size, None),
        )
        for index, (rows, columns) in enumerate((h, w) for h in cuts for w in cuts):
            image[:, rows, columns, :] = index
        windows = window_partition(image, self.window_size)
        windows = windows.view(-1, self.window_size * self.window_size)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        H, W = self.input_resolution
        B, L, C = x.shape
        assert L == H * W, "input feature has wrong size"
        shortcut = x
        x = self.norm1(x).view(B, H, W, C)
        shift = self.shift_size
        if shift > 0:
            x = torch.roll(x, shifts=(-shift, -shift), dims=(1, 2))
        windows = window_partition(x, self.window_size)
        windows = windows.view(-1, self.window_size * self.window_size, C)
        attended = self.attn(windows, mask=self.attn_mask)
        attended = attended.view(-1, self.window_size, self.window_size, C)
        x = window_reverse(attended, self.window_size, H, W)
        if shift > 0:
            x = torch.roll(x, shifts=(shift, shift), dims=(1, 2))
        x = shortcut + self.drop_path(x.view(B, H * W, C))
        shortcut = x
        x = self.norm2(x)
        if self.is_moe:
            x, l_aux = self.mlp(x)
            return shortcut + self.drop_path(x), l_aux
        return shortcut + self.drop_path(self.mlp(x))


class PatchMerging(nn.Module):
    def __init__(self, input_resolution: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.input_resolution, self.dim = input_resolution, dim
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm(4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        H, W = self.input_resolution
        B, _, C = x.shape
        x = x.view(B, H, W, C)
        parts = [x[:, row::2, column::2, :] for column in (0, 1) for row in (0, 1)]
        x = torch.cat(parts, -1).view(B, -1, 4 * C)
        return self.reduction(self.norm(x))


class BasicLayer(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], downsample: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        l_aux = 0.0
        for block in self.blocks:
            out = block(x)
            if isinstance(out, tuple):
                x, own = out
                l_aux = own + l_aux
            else:
                x = out
        if self.downsample is not None:
            x = self.downsample(x)
        return x, l_aux


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.img_size = (IMAGE, IMAGE)
        self.proj = nn.Conv2d(CHANNELS, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        _, _, H, W = x.shape
        assert self.img_size == (H, W), f"input image size ({H}*{W}) does not match the model"
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class SwinTransformerMoE(nn.Module):
    """Two stages of two blocks, the second of which has experts. Returns logits and the loss."""

    def __init__(
        self,
        num_classes: int = 5,
        num_heads: tuple[int, int] = (2, 4),
        window_size: int = 4,
        mlp_ratio: float = 2.0,
        moe_blocks: tuple[tuple[int, ...], ...] = ((1,), (1,)),
        num_local_experts: int = EXPERTS,
        top_value: int = 1,
        capacity_factor: float = 1.25,
        cosine_router: bool = False,
        normalize_gate: bool = False,
        use_bpr: bool = True,
        aux_loss_weight: float = 0.01,
    ) -> None:
        super().__init__()
        self.aux_loss_weight = aux_loss_weight
        self.patch_embed = PatchEmbed()
        self.pos_drop = nn.Dropout(p=0.0)
        self.layers = nn.ModuleList()
        for stage, heads in enumerate(num_heads):
            dim, side = WIDTH * 2**stage, IMAGE // PATCH // 2**stage

            def mlp(block: int, dim: int = dim, stage: int = stage) -> nn.Module:
                hidden = int(dim * mlp_ratio)
                if block not in moe_blocks[stage]:
                    return Mlp(dim, hidden)
                return MoEMlp(
                    dim,
                    hidden,
                    num_local_experts,
                    top_value,
                    capacity_factor,
                    cosine_router,
                    normalize_gate,
                    use_bpr,
                )

            blocks = [
                SwinTransformerBlock(
                    dim,
                    (side, side),
                    heads,
                    window_size,
                    0 if block % 2 == 0 else window_size // 2,
                    mlp(block),
                )
                for block in range(2)
            ]
            last = stage == len(num_heads) - 1
            downsample = None if last else PatchMerging((side, side), dim)
            self.layers.append(BasicLayer(blocks, downsample))
        self.norm = nn.LayerNorm(dim)
        self.avgpool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.pos_drop(self.patch_embed(x))
        l_aux = 0.0
        for layer in self.layers:
            x, own = layer(x)
            l_aux = own + l_aux
        x = self.avgpool(self.norm(x).transpose(1, 2))
        return self.head(torch.flatten(x, 1)), l_aux * self.aux_loss_weight


def images(batch: int = 2, length: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
    """The image size is fixed."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(batch, CHANNELS, IMAGE, IMAGE, generator=generator),)


ORIGIN = "microsoft/Swin-Transformer models/swin_transformer_moe.py"
PATHS = tuple(f"layers.{stage}.blocks.1.mlp._moe_layer" for stage in (0, 1))
BATCH = {"x": {0: "batch"}}

CASES = [
    Case(
        name="swin-moe",
        origin=ORIGIN,
        make=SwinTransformerMoE,
        moe_paths=PATHS,
        num_experts=EXPERTS,
        exact=True,
        args=images,
        dynamic=BATCH,
        notes="the original's defaults: top-1, capacity 1.25, batch-prioritised; returns its loss",
    ),
    Case(
        name="swin-moe-dropless",
        origin=ORIGIN,
        make=lambda: SwinTransformerMoE(capacity_factor=0.0, use_bpr=False),
        moe_paths=PATHS,
        num_experts=EXPERTS,
        args=images,
        dynamic=BATCH,
        notes="as it is evaluated without drops",
    ),
    Case(
        name="swin-moe-cosine",
        origin=ORIGIN,
        make=lambda: SwinTransformerMoE(
            capacity_factor=0.0, cosine_router=True, top_value=2, normalize_gate=True
        ),
        moe_paths=PATHS,
        num_experts=EXPERTS,
        args=images,
        dynamic=BATCH,
    ),
]
