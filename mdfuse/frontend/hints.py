"""Hints for operations that do not exist: why, and replacements that compute the same.

Only exact replacements are proposed: a name that looks alike means something else.
"""

from __future__ import annotations

#: name -> its replacement, for x[5,4], y[5,4], p[5,4] in (0, 1), i[5] and v[4]; `fd` is the
#: definition. `tests/frontend/test_hints.py` runs each beside torch's own.
REPLACEMENTS: dict[str, str] = {
    "bincount": "fd.ops.one_hot(i, 4).sum(0)",
    "sum_to_size": "x.sum(0, keepdim=True)",
}

#: The same, where numbers are drawn.
DRAWN: dict[str, str] = {
    "dropout": "fd.ops.dropout(x, 0.5, seed=1)",
    "rand_like": "fd.ops.uniform(x.shape, seed=1)",
    "rand": "fd.ops.uniform((5, 4), seed=1)",
    "randn_like": "fd.ops.uniform(x.shape, -0.9999999, 1.0, seed=1).erfinv() * 2**0.5",
    "randn": "fd.ops.uniform((5, 4), -0.9999999, 1.0, seed=1).erfinv() * 2**0.5",
    "bernoulli": "(fd.ops.uniform(p.shape, seed=1) < p).float()",
    "gumbel_softmax": "(x - (-fd.ops.uniform(x.shape, 1e-7, seed=1).log()).log()).softmax(-1)",
    "multinomial": "(p / fd.ops.uniform(p.shape, 1e-7, seed=1).log()).argsort(-1)",
}

_COUNT = "how many elements it has is known only when the program runs"
_NO_TENSOR = "a handle stands for a tensor that does not exist yet"
_LOOK = "make it an output, and look at what a run returns"
_NO_DEVICE = "each rank has its part on a device of its own"
_MESH = "leave it out: the mesh says which ranks, and each rank its device"
_NO_GRADIENT = "gradients are values of the definition: (dx,) = mf.grad(y, [x])"
_KEPT = "where(mask, x, other) keeps the shape"
_OUTSIDE = "compute it outside of the program, and make it an input"

#: name -> (why there is no such operation, what to do).
REASONS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("masked_select", "nonzero", "argwhere"), (_COUNT, _KEPT)),
    **dict.fromkeys(
        ("unique", "unique_consecutive"), (_COUNT, "sort puts equal elements side by side")
    ),
    "bincount": (_COUNT, f"for example {REPLACEMENTS['bincount']}"),
    **{
        name: ("random numbers depend on a seed that you choose", f"for example {text}")
        for name, text in DRAWN.items()
    },
    "as_strided": (
        "where a value lies in memory is open until the program is lowered",
        "reshape, permute, unfold or diagonal",
    ),
    **dict.fromkeys(
        (
            "svd",
            "linalg_svd",
            "svdvals",
            "eig",
            "eigh",
            "qr",
            "lu",
            "lstsq",
            "fft_fft",
            "fft",
            "linalg_inv",
            "inverse",
            "linalg_solve",
            "linalg_cholesky",
            "cholesky",
        ),
        ("there is no operation of the same meaning", _OUTSIDE),
    ),
    **dict.fromkeys(("item", "tolist", "numpy", "data_ptr", "data"), (_NO_TENSOR, _LOOK)),
    **dict.fromkeys(
        ("stride", "is_contiguous"), (_NO_TENSOR, "x.contiguous() asks for a memory order")
    ),
    **dict.fromkeys(("device", "cuda", "cpu", "is_cuda"), (_NO_DEVICE, _MESH)),
    **dict.fromkeys(
        ("backward", "grad", "requires_grad", "requires_grad_", "grad_fn"),
        (_NO_GRADIENT, "name the inputs in mf.grad"),
    ),
    "__getitem__": (
        "operands are values of the definition and numbers",
        "make the tensor an input with fd.define_tensor, or a constant with fd.ops.tensor",
    ),
    "_scaled_mm": (
        "there is no operation of the same meaning",
        "(x.to(torch.bfloat16) @ y.to(torch.bfloat16)) * scale",
    ),
}


def hint_for(name: str) -> str:
    """Return a replacement for the torch name, as a hint."""
    if name in REASONS:
        return REASONS[name][1]
    replacement = REPLACEMENTS.get(name)
    return f"for example {replacement}" if replacement else "docs/operations.md lists what there is"


def reason_for(name: str) -> str:
    """Return the reason why no operation has this name."""
    return REASONS.get(name, ("there is no operation of the same meaning", ""))[0]
