"""``write_to_cache``, against a loop over rows."""

from __future__ import annotations

import pytest
import torch

import custom_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_opcheck(dtype: torch.dtype) -> None:
    cache, new = torch.zeros(2, 3, 8, 4, dtype=dtype), torch.ones(2, 3, 2, 4, dtype=dtype)
    operator = torch.ops.moe.write_to_cache.default
    torch.library.opcheck(operator, (cache, new, torch.tensor([0, 6])))


@pytest.mark.parametrize("sizes", [(), (3,), (2, 3)])
@pytest.mark.parametrize("new_tokens", [0, 1, 5, 8])
def test_each_row_has_its_own_place(sizes: tuple[int, ...], new_tokens: int) -> None:
    cache = torch.randn(3, *sizes, 4, 8).mT
    new = torch.randn(3, *sizes, new_tokens, 4)
    positions = torch.tensor([0, (8 - new_tokens) // 2, 8 - new_tokens])
    before = cache.clone()
    written = custom_ops.write_to_cache(cache, new, positions)
    expected = cache.clone()
    for row, position in enumerate(positions.tolist()):
        expected[row, ..., position : position + new_tokens, :] = new[row]
    assert torch.equal(written, expected)
    assert written.is_contiguous()
    assert torch.equal(cache, before)


def test_errors() -> None:
    cache, new = torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 2, 4)
    first = torch.zeros(2, dtype=torch.int64)
    write = custom_ops.write_to_cache
    for given in (torch.tensor([0, 7]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match=r"positions must be in 0\.\.6, so that 2 tokens fit"):
            write(cache, new, given)
    with pytest.raises(ValueError, match="one number of dimensions"):
        write(cache, new[0], first)
    with pytest.raises(ValueError, match="sizes but for the tokens"):
        write(cache, new[..., :3], first)
    with pytest.raises(ValueError, match=r"positions must be \[2\], one for each row"):
        write(cache, new, first[:1])
    with pytest.raises(TypeError, match=r"positions int64; got torch\.float16 and torch\.int64"):
        write(cache, new.half(), first)
    with pytest.raises(TypeError, match=r"got torch\.float32 and torch\.int32"):
        write(cache, new, first.int())
