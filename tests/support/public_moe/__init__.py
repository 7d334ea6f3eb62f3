"""Small models around MoE modules as public repositories write them.

One file per family. Attribute names, module trees, layouts, the order of the computation and what
forward takes and returns are the originals'; the words are not. ``CASES`` lists them all.
"""

from public_moe.cases import CASES
from public_moe.surroundings import Case

__all__ = ["CASES", "Case"]
