"""Small models around MoE modules as public repositories write them.

There is one file per family. Attribute names, module trees, layouts, the order of the computation
and forward's signature are the originals'; the code is written anew. ``CASES`` lists all cases.
"""

from public_moe.cases import CASES
from public_moe.surroundings import Case

__all__ = ["CASES", "Case"]
