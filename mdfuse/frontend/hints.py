"""Hints for operations that do not exist: replacements that compute the same.

Where there is none, nothing is proposed: a name that looks alike means something else.
"""

from __future__ import annotations

#: name -> what to write instead, for x[5,4], y[5,4], p[5,4] in (0, 1), i[5] and v[4]; `fd` is the
#: definition. `tests/frontend/test_hints.py` runs each beside torch's own.
REPLACEMENTS: dict[str, str] = {
    "H": "x.mT",
    "aminmax": "x.amin(), x.amax()",
    "cosine_similarity": "(fd.ops.normalize(x) * fd.ops.normalize(y)).sum(1)",
    "deg2rad": "x * 0.017453292519943295",
    "diff": "x[:, 1:] - x[:, :-1]",
    "empty_like": "fd.ops.zeros_like(x)",
    "eye": "(fd.ops.arange(5)[:, None] == fd.ops.arange(5)).float()",
    "gather": "fd.ops.where(i[:, None] == fd.ops.arange(4), x, 0).sum(1)",
    "hstack": "fd.ops.cat([x, y], 1)",
    "hypot": "(x * x + y * y).sqrt()",
    "index_select": "fd.ops.embedding(i, x)",
    "inner": "x @ y.T",
    "isclose": "(x - y).abs() <= 1e-8 + 1e-5 * y.abs()",
    "logaddexp": "fd.ops.logsumexp(fd.ops.stack([x, y]), 0)",
    "logit": "(p / (1 - p)).log()",
    "nansum": "fd.ops.where(x.isnan(), 0.0, x).sum()",
    "new_empty": "fd.ops.zeros((3, 2), dtype=x.dtype)",
    "one_hot": "(i[:, None] == fd.ops.arange(4)).long()",
    "pairwise_distance": "fd.ops.norm(x - y + 1e-6, dim=-1)",
    "positive": "+x",
    "rad2deg": "x * 57.29577951308232",
    "sgn": "x.sign()",
    "sum_to_size": "x.sum(0, keepdim=True)",
    "tanhshrink": "x - x.tanh()",
    "tensor_split": "x.split([2, 3])",
    "threshold": "fd.ops.where(x > 0.5, x, 0.25)",
    "tile": "x.repeat(1, 2)",
    "tril": "fd.ops.where(fd.ops.arange(5)[:, None] >= fd.ops.arange(4), x, 0.0)",
    "triu": "fd.ops.where(fd.ops.arange(5)[:, None] <= fd.ops.arange(4), x, 0.0)",
    "vdot": "v.dot(v)",
    "vstack": "fd.ops.cat([x, y])",
    "xlogy": "x * p.log()",
}

#: The same, where numbers are drawn.
DRAWN: dict[str, str] = {
    "dropout": "fd.ops.dropout(x, 0.5, seed=1): random numbers depend on a seed that you choose",
    "rand_like": "fd.ops.uniform(x.shape, seed=1)",
    "rand": "fd.ops.uniform((5, 4), seed=1)",
    "bernoulli": "(fd.ops.uniform(p.shape, seed=1) < p).float()",
}

#: Names that torch gives what has another one in a definition.
_OTHER_NAMES = {"__getitem__": "index_select", "take_along_dim": "gather", "row_stack": "vstack"}


def hint_for(name: str) -> str:
    """Return what to write instead of something of torch that has this name."""
    name = _OTHER_NAMES.get(name, name)
    found = REPLACEMENTS.get(name) or DRAWN.get(name)
    return f"for example {found}" if found else "docs/operations.md lists what there is"
