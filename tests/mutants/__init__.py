"""Small mistakes to plant in fuser, by area: each is one that a test should notice.

``python tests/mutants/run.py`` plants them one at a time in a copy of the repository, runs the
tests that should notice, and says which did. ``tests/repository/test_mutants.py`` keeps the list
up to date with the sources.
"""

from mutants.adapters import ADAPTERS, STATE_DICTS
from mutants.compiling import COMPILING
from mutants.converting import CONVERTING
from mutants.experts import EXPERTS
from mutants.extending import EXTENDING
from mutants.graphs import GRAPHS
from mutants.grouped_gemm import GROUPED_GEMM
from mutants.grouped_linears import GROUPED_LINEARS
from mutants.groups import GROUPS
from mutants.inspecting import INSPECTION
from mutants.kernels import ARITHMETIC, BARRIERS, EDGES
from mutants.launching import PASS_GRAPHS, SEQUENCES
from mutants.mutant import Mutant
from mutants.nodes import NODES
from mutants.ops import BASIC_OPS, FUSED_OPS, SENTENCES
from mutants.parallel import PARALLEL
from mutants.planning import CHANNELS, PLAN_KEYS, PLANNER, REBUILT
from mutants.sharding import SHARDING
from mutants.te_programs import TE_PROGRAMS
from mutants.tensors import MATRIX_PRODUCTS, NUMBER_FORMATS, QUANTIZED_TENSORS
from mutants.training import DELAYED_SCALING, KEPT_WEIGHTS, RECOMPUTATION, STATE

AREAS: dict[str, tuple[Mutant, ...]] = {
    "launch sequences": SEQUENCES,
    "graphs of passes": PASS_GRAPHS,
    "graphed callables": GRAPHS,
    "pipelines in torch.compile": COMPILING,
    "kept weights": KEPT_WEIGHTS,
    "delayed scaling": DELAYED_SCALING,
    "recomputation": RECOMPUTATION,
    "state": STATE,
    "state dicts": STATE_DICTS,
    "adapters of low rank": ADAPTERS,
    "conversion": CONVERTING,
    "channels and extra outputs": CHANNELS,
    "tensors computed again": REBUILT,
    "planner": PLANNER,
    "autograd nodes": NODES,
    "recipes and plan keys": PLAN_KEYS,
    "quantized tensors": QUANTIZED_TENSORS,
    "inspection": INSPECTION,
    "sharding": SHARDING,
    "number formats": NUMBER_FORMATS,
    "matrix products": MATRIX_PRODUCTS,
    "basic ops": BASIC_OPS,
    "fused ops": FUSED_OPS,
    "checks and sentences": SENTENCES,
    "extensions of users": EXTENDING,
    "router and permutation by expert": EXPERTS,
    "groups of rows": GROUPS,
    "grouped linears": GROUPED_LINEARS,
    "grouped products": GROUPED_GEMM,
    "programs for Transformer Engine": TE_PROGRAMS,
    "communication over ranks": PARALLEL,
    "kernels: barriers": BARRIERS,
    "kernels: edges": EDGES,
    "kernels: arithmetic": ARITHMETIC,
}

__all__ = ["AREAS", "Mutant"]
