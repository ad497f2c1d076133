"""Sizes of transformers, and those of some public models, for plans and forecasts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fuser.errors import InputError

MAY_BE_ABSENT = ("heads", "kv_heads", "vocab", "experts", "top_k")


@dataclass(frozen=True)
class Transformer:
    """The sizes of a transformer of SwiGLU blocks; all layers are alike.

    ``intermediate`` is the width of one expert if there are ``experts``, of which each token goes
    to ``top_k``. Without ``heads`` there is no attention, without ``vocab`` neither embedding nor
    head. Norms and routers have no weights here: they are less than a thousandth. Raises InputError
    if a size is not positive, or if heads or experts do not fit each other.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    sequence: int = 8192
    experts: int = 0
    top_k: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            least = 0 if field.name in MAY_BE_ABSENT else 1
            if field.name != "name" and size < least:
                raise InputError(
                    f"{self.name} has {field.name} {size}; it must be {least} or more."
                )
        if not bool(self.experts) <= self.top_k <= self.experts:
            raise InputError(
                f"{self.name} has {self.experts} experts and top_k {self.top_k}; a token goes to "
                "one expert or more, and both are 0 in a dense model."
            )
        if bool(self.heads) != bool(self.kv_heads) or self.heads % max(1, self.kv_heads):
            raise InputError(
                f"{self.name} has {self.heads} heads and {self.kv_heads} kv heads, which do not "
                "divide them."
                " Choose a multiple."
            )

    @property
    def qkv_features(self) -> int:
        """Outputs of the linear that makes queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_features(self) -> int:
        """Inputs of the linear after attention."""
        return self.heads * self.head_dim

    def layer_parameters(self, experts: int) -> int:
        """Weights of a layer of which ``experts`` are counted; one in a dense model."""
        attention = (self.qkv_features + self.attention_features) * self.hidden
        return attention + experts * 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All weights, with separate embedding and head."""
        return self.layers * self.layer_parameters(self.experts or 1) + 2 * self.vocab * self.hidden

    @property
    def active_parameters(self) -> int:
        """The weights that multiply a token: those of its experts, and no embedding."""
        return self.layers * self.layer_parameters(self.top_k or 1) + self.vocab * self.hidden

    @property
    def flops_per_token(self) -> int:
        """Operations of forward and backward: six a weight, and causal attention.

        Queries with keys and probabilities with values are four a pair of positions, feature and
        forward; half of the pairs are masked; backward is twice forward.
        """
        attention = 3 * self.layers * 2 * self.sequence * self.attention_features
        return 6 * self.active_parameters + attention


PRESETS = {
    one.name: one
    for one in (
        # Layers, hidden, intermediate, heads, kv heads, vocabulary: "The Llama 3 Herd of Models"
        # (2024), table 3; the width of its feed-forward blocks as in the published weights.
        Transformer("llama3-8b", 32, 4096, 14336, 32, 8, 128256),
        Transformer("llama3-70b", 80, 8192, 28672, 64, 8, 128256),
        Transformer("llama3-405b", 126, 16384, 53248, 128, 8, 128256),
        # Feed-forward blocks alone, of the sizes that benchmarks/pipelines.py times.
        Transformer("swiglu-blocks", 8, 4096, 14336, 0, 0, 0, sequence=1),
        # config.json of mistralai/Mixtral-8x22B-v0.1.
        Transformer("mixtral-8x22b", 56, 6144, 16384, 48, 8, 32000, experts=8, top_k=2),
        # config.json of Qwen/Qwen3-8B.
        Transformer("qwen3-8b", 36, 4096, 12288, 32, 8, 151936),
        # config.json of Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B.
        Transformer("qwen3-30b-a3b", 48, 2048, 768, 32, 4, 151936, experts=128, top_k=8),
        Transformer("qwen3-235b-a22b", 94, 4096, 1536, 64, 4, 151936, experts=128, top_k=8),
    )
}


def preset(name: str) -> Transformer:
    """The public model ``name``. Raises InputError if there is none of this name."""
    if name not in PRESETS:
        raise InputError(f"There is no model {name!r}; there are {', '.join(PRESETS)}.")
    return PRESETS[name]
