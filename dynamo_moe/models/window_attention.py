"""Attention inside the shifted windows of a Swin Transformer (arXiv 2103.14030, section 3.2).

Tensor names carry their axes::

    B images      L tokens of the grid, in row order      C channels
    G windows     N tokens of a window     A attention heads     d channels of a head
"""

import torch
from torch import Tensor, nn

__all__ = ["WindowAttention"]


class WindowAttention(nn.Module):
    """Multi-head attention inside the windows of a square grid, with relative position bias.

    A cyclic shift of the grid followed by its partition into windows is one permutation of the
    tokens, so both are a single gather, and undoing them is another.

    Args:
        dim: Channels C.
        grid_size: Height and width of the grid, in tokens.
        window_size: Height and width of a window, in tokens; it divides `grid_size`.
        shift: Rows and columns by which the windows are shifted; 0 for none.
        num_heads: Attention heads A.
    """

    position_index: Tensor
    window_order_L: Tensor
    grid_order_L: Tensor
    mask_G1NN: Tensor | None

    def __init__(
        self, dim: int, grid_size: int, window_size: int, shift: int, num_heads: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_windows = (grid_size // window_size) ** 2
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.position_bias = nn.Parameter(torch.empty(num_heads, (2 * window_size - 1) ** 2))
        nn.init.trunc_normal_(self.position_bias, std=0.02)

        order_L = _window_order(grid_size, window_size, shift)
        mask_G1NN = _shift_mask(grid_size, window_size, shift) if shift else None
        self.register_buffer("position_index", _position_index(window_size), persistent=False)
        self.register_buffer("window_order_L", order_L, persistent=False)
        self.register_buffer("grid_order_L", order_L.argsort(), persistent=False)
        self.register_buffer("mask_G1NN", mask_G1NN, persistent=False)

    def forward(self, x_BLC: Tensor) -> Tensor:
        """Computes the attention: `[B, L, C]` to `[B, L, C]`, tokens in row order."""
        _, tokens, dim = x_BLC.shape
        window = (self.num_windows, tokens // self.num_windows)
        heads = (self.num_heads, dim // self.num_heads)

        if self.num_windows > 1:
            x_BLC = x_BLC.index_select(1, self.window_order_L)
        qkv = self.qkv(x_BLC).reshape(-1, *window, 3, *heads).permute(3, 0, 1, 4, 2, 5)
        q_BGANd, k_BGANd, v_BGANd = qkv[0], qkv[1], qkv[2]
        scores_BGANN = (q_BGANd * heads[1] ** -0.5) @ k_BGANd.transpose(-2, -1)
        out_BGANd = (scores_BGANN + self._bias(window[1])).softmax(dim=-1) @ v_BGANd
        out_BLC: Tensor = self.proj(out_BGANd.transpose(2, 3).reshape(-1, tokens, dim))
        if self.num_windows > 1:
            out_BLC = out_BLC.index_select(1, self.grid_order_L)
        return out_BLC

    def _bias(self, n: int) -> Tensor:
        bias_ANN = self.position_bias.index_select(1, self.position_index).reshape(-1, n, n)
        return bias_ANN if self.mask_G1NN is None else bias_ANN + self.mask_G1NN


def _partition(grid: Tensor, window_size: int) -> Tensor:
    """Cuts a grid `[rows, columns]` into its windows `[G, N]`."""
    count = grid.shape[0] // window_size
    windows = grid.reshape(count, window_size, count, window_size).transpose(1, 2)
    return windows.reshape(count * count, window_size * window_size)


def _window_order(grid_size: int, window_size: int, shift: int) -> Tensor:
    """The tokens of the shifted grid, window by window: `[L]`."""
    grid = torch.arange(grid_size * grid_size).reshape(grid_size, grid_size)
    return _partition(grid.roll((-shift, -shift), (0, 1)), window_size).flatten()


def _shift_mask(grid_size: int, window_size: int, shift: int) -> Tensor:
    """0 for two tokens that may see each other, else -inf: `[G, 1, N, N]`.

    Rows and columns that the shift rolls in share a window with tokens from the opposite side.
    """
    rolled_in = (torch.arange(grid_size) >= grid_size - shift).long()
    region_GN = _partition(2 * rolled_in[:, None] + rolled_in, window_size)
    foreign_GNN = region_GN[:, :, None] != region_GN[:, None, :]
    return torch.zeros(foreign_GNN.shape).masked_fill(foreign_GNN, -torch.inf).unsqueeze(1)


def _position_index(window_size: int) -> Tensor:
    """The entry of the bias table for each pair of a window's tokens: `[N * N]`."""
    token = torch.arange(window_size * window_size)
    row, column = token // window_size, token % window_size
    row_offset = row[:, None] - row + window_size - 1
    column_offset = column[:, None] - column + window_size - 1
    return (row_offset * (2 * window_size - 1) + column_offset).flatten()
