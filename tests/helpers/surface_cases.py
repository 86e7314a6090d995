"""Programs in torch's own spelling: each is one Python function, run on tensors and on handles.

A key begins with the name of the operation that it covers; "name-more" says what is special.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from helpers import surface_more

#: Operands by name. Values are drawn from (0.25, 4), signs vary but for those called positive.
SHAPES: dict[str, tuple[int, ...]] = {
    "x": (5, 4), "y": (5, 4), "v": (4,), "u": (5,), "w": (4, 3), "a": (2, 5, 4), "b": (2, 4, 3),
    "s": (), "one": (5, 1, 4), "p": (5, 4), "q": (1, 4, 5, 6), "k": (1, 2, 5, 6),
}  # fmt: skip
DTYPES = {"h": torch.bfloat16, "i": torch.int64, "j": torch.int64, "m": torch.bool}
SHAPES |= {"h": (5, 4), "i": (5, 4), "j": (5, 4), "m": (5, 4)}
SHAPES |= surface_more.SHAPES
POSITIVE = {"p"} | surface_more.POSITIVE


def operands(names: str) -> list[torch.Tensor]:
    """Tensors for the letters or words of a case."""
    found = []
    for seed, name in enumerate(names.split()):
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(SHAPES[name], generator=generator, dtype=torch.float64) * 3.75 + 0.25
        if name not in POSITIVE:
            x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, x, -x)
        dtype = DTYPES.get(name, torch.float64)
        found.append(x > 0 if dtype == torch.bool else (x * 3).to(dtype))
    return found


#: Elementwise methods and functions of one tensor.
UNARY = (
    "abs", "absolute", "acosh", "asinh", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp",
    "exp2", "expm1", "fix", "floor", "frac", "isfinite", "isinf", "isnan", "logical_not", "neg",
    "negative", "reciprocal", "relu", "round", "sigmoid", "sign", "sin", "sinh", "square", "tan",
    "tanh", "trunc",
)  # fmt: skip
POSITIVE_UNARY = ("log", "log10", "log1p", "log2", "rsqrt", "sqrt", "acos", "asin", "atanh")
BINARY = (
    "add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "floor_divide",
    "remainder", "fmod", "atan2", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "less",
    "less_equal", "greater", "greater_equal", "not_equal", "logical_and", "logical_or",
    "logical_xor",
)  # fmt: skip
ACTIVATIONS = (
    "relu", "silu", "elu", "softplus", "gelu", "leaky_relu", "logsigmoid", "mish", "selu",
    "hardtanh", "relu6", "hardsigmoid", "hardswish", "softsign",
)  # fmt: skip

#: name -> (operands, program).
CASES: dict[str, tuple[str, Callable[..., Any]]] = {}
for _name in UNARY:
    CASES[_name] = ("x", lambda x, n=_name: (getattr(x, n)(), getattr(torch, n)(x)))
for _name in POSITIVE_UNARY:
    CASES[_name] = ("p", lambda x, n=_name: (getattr(torch, n)(x), getattr(x, n)()))
for _name in BINARY:
    CASES[_name] = ("x v", lambda x, v, n=_name: (getattr(x, n)(v), getattr(torch, n)(x, v)))
for _name in ACTIVATIONS:
    CASES[f"{_name}-F"] = ("x", lambda x, n=_name: getattr(F, n)(x))
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    CASES[_name] = ("i j", lambda i, j, n=_name: (getattr(torch, n)(i, j), getattr(i, n)(j)))
for _name in ("sum", "prod", "mean", "amax", "amin", "all", "any"):
    CASES[f"{_name}-everything"] = ("x", lambda x, n=_name: (getattr(x, n)(), getattr(torch, n)(x)))
    CASES[f"{_name}-dim"] = ("x", lambda x, n=_name: getattr(x, n)(dim=1))
    CASES[f"{_name}-keepdim"] = ("x", lambda x, n=_name: getattr(torch, n)(x, 0, keepdim=True))

CASES |= {
    # -- dtypes
    "to": ("x", lambda x: (x.to(torch.float32), x.to(x.dtype))),
    "to-keyword": ("x", lambda x: x.to(dtype=torch.float16)),
    "to-like": ("x h", lambda x, h: x.to(h)),
    "type_as": ("x h", lambda x, h: x.type_as(h)),
    "dtypes-floating": ("x", lambda x: (x.float(), x.double(), x.half(), x.bfloat16())),
    "dtypes-integer": ("x", lambda x: (x.int(), x.long(), x.short(), x.char(), x.bool())),
    # -- elementwise
    "clamp": ("x", lambda x: (x.clamp(-1, 1), torch.clamp(x, max=2), x.clamp(min=0.5))),
    "clamp-values": ("x y p", lambda x, y, p: (torch.clamp(x, y, p), x.clamp(max=y))),
    "clip": ("x", lambda x: (x.clip(-1, 1), torch.clip(x, max=2))),
    "clamp_min": ("x", lambda x: (x.clamp_min(0), torch.clamp_min(x, 1))),
    "clamp_max": ("x", lambda x: (x.clamp_max(0), torch.clamp_max(x, 1))),
    "add-alpha": ("x y", lambda x, y: (torch.add(x, y, alpha=2), x.add(y, alpha=-1), x.add(3))),
    "sub-alpha": ("x y", lambda x, y: (x.sub(y, alpha=2), torch.sub(x, 1.5))),
    "rsub": ("x y", lambda x, y: (torch.rsub(x, y, alpha=2), torch.rsub(x, 1))),
    "div-floor": ("x y", lambda x, y: torch.div(x, y, rounding_mode="floor")),
    "div-trunc": ("x y", lambda x, y: x.div(y, rounding_mode="trunc")),
    "div-integers": ("i", lambda i: (torch.div(i, 7, rounding_mode="trunc"), i.div(4))),
    "div-large": (
        "i", lambda i: torch.div(i * 0 - 9007199254740993, 2, rounding_mode="trunc")),
    "pow": ("p x", lambda p, x: (torch.pow(p, 2), p.pow(x), torch.pow(p, 0.5), 2**x)),
    "lerp": ("x y", lambda x, y: (torch.lerp(x, y, 0.25), x.lerp(y, 0.75))),
    "addcmul": ("x y v", lambda x, y, v: torch.addcmul(x, y, v, value=0.5)),
    "addcdiv": ("x y p", lambda x, y, p: x.addcdiv(y, p, value=2)),
    "masked_fill": ("x m", lambda x, m: (x.masked_fill(m, -9.5), torch.masked_fill(x, ~m, 0))),
    "masked_fill-infinite": ("h m", lambda h, m: h.masked_fill(m, float("-inf"))),
    "masked_fill-integer": ("i m", lambda i, m: i.masked_fill(m, 3)),
    "where": ("x y m", lambda x, y, m: (torch.where(m, x, y), x.where(m, y), x.where(x > y, 0.0))),
    "nan_to_num": ("x", lambda x: (x / (x * 0)).nan_to_num(1.5, neginf=-2)),
    "nan_to_num-integer": ("i", lambda i: i.nan_to_num(2.0)),
    "nan_to_num-defaults": ("h", lambda h: torch.nan_to_num(h.log() / 0)),
    "full_like": ("x", lambda x: (torch.full_like(x, 0.1), torch.full_like(x / 0 * 0, 0.1))),
    "full_like-dtypes": (
        "h i m",
        lambda h, i, m: (
            torch.full_like(h, 0.1), torch.full_like(i, 3), torch.full_like(m, 1),
            torch.full_like(i, 2.5, dtype=torch.float32),
        ),
    ),
    "zeros_like": ("x m", lambda x, m: (torch.zeros_like(x), torch.zeros_like(m))),
    "new_zeros": ("x h", lambda x, h: (x.new_zeros(2, 3), h.new_zeros((4,)) + 1)),
    "new_ones": ("i", lambda i: (i.new_ones(2), i.new_ones((2, 3), dtype=torch.bool))),
    "new_full": ("h m", lambda h, m: (h.new_full((2, 3), 1.5), m.new_full([], 1))),
    "ones_like": ("x", lambda x: torch.ones_like(x, dtype=torch.int32)),
    "bitwise_not": ("i", lambda i: (torch.bitwise_not(i), ~i)),
    "gelu": ("x", lambda x: F.gelu(x, approximate="tanh")),
    "elu": ("x", lambda x: F.elu(x, 0.5)),
    "softplus": ("x", lambda x: F.softplus(x, 2.0, 3.0)),
    "leaky_relu": ("x", lambda x: F.leaky_relu(x, 0.2, inplace=False)),
    "hardtanh": ("x", lambda x: F.hardtanh(x, -2, 0.5)),
    "operators": (
        "x y",
        lambda x, y: (+x, -x, abs(x), 2 - x, x // y, x % 3, (x < y) & (x > 0), ~(x == y)),
    ),
    "mod": ("x y", lambda x, y: x % y),
    # -- reductions
    "sum": ("x", lambda x: (torch.sum(x, (0, 1)), x.sum(-1, True), x.sum(1, dtype=torch.float32))),
    "sum-input": ("x", lambda x: torch.sum(input=x, dim=0)),
    "prod-dtype": ("h", lambda h: torch.prod(h, 0, dtype=torch.float64)),
    "mean": ("a", lambda a: (a.mean((0, 2)), torch.mean(a, dim=(0, 1), keepdim=True))),
    "mean-dtype": ("h", lambda h: h.mean(0, dtype=torch.float64)),
    "max": ("x y", lambda x, y: (x.max(), torch.max(x), torch.max(x, y), x.max(y))),
    "max-dim": ("x", lambda x: (*x.max(1), x.max(-1)[0], torch.max(x, 0).indices)),
    "max-keepdim": ("a", lambda a: (*torch.max(a, dim=1, keepdim=True), *a.max(2, True))),
    "max-ties": ("i", lambda i: (*(i % 2).max(1), *(i % 2 == 0).max(0))),
    "max-nan": ("x", lambda x: (*x.log().max(1), *x.log().min(0), x.log().argmax(0))),
    "min": ("x y", lambda x, y: (x.min(), torch.min(x), torch.min(x, y), x.min(y))),
    "all-bytes": (
        "i", lambda i: ((i * i).byte().all(), i[0, 0].byte().all(), i[0].byte().any(0))),
    "min-dim": ("x", lambda x: (*x.min(dim=0), *torch.min(x, -1), x.min(1).values)),
    "argmax": (
        "a", lambda a: (a.argmax(), a.argmax(1), torch.argmax(a, dim=-1, keepdim=True))),
    "argmin": ("i", lambda i: (torch.argmin(i), i.argmin(0), (i % 3).argmin(-1, True))),
    "amin": ("a", lambda a: (a.amin((0, 1)), torch.amin(a, -1, True))),
    "amax": ("a", lambda a: (a.amax((0, 1)), torch.amax(a, -1, True))),
    "topk": (
        "x", lambda x: (*x.topk(2), *torch.topk(x, 3, dim=0), torch.topk(x, 0, 1).values)),
    "topk-smallest": (
        "a", lambda a: (*torch.topk(a, 4, 1, largest=False), a.topk(1, -1, False, True).indices)),
    "topk-nan": ("x", lambda x: (*x.log().topk(3, 0), *x.log().topk(4, 1, largest=False))),
    "topk-scalar": ("s", lambda s: (*s.topk(1), *torch.topk(s, 1, 0))),
    "sort": (
        "x", lambda x: (*x.sort(), *torch.sort(x, 0, True), *torch.sort(x, dim=-1).values.sort(0))),
    "sort-stable": (
        "i", lambda i: (*(i % 2).sort(dim=0, stable=True), *torch.sort(i % 3, stable=True))),
    "sort-stable-down": ("i", lambda i: torch.sort(i % 2, descending=True, stable=True)),
    "sort-bool": ("m", lambda m: (m.sort(0).values, m.sort(1, True).values)),
    "sort-nan": ("x", lambda x: (x.log().sort(0).values, x.log().sort(descending=True).values)),
    "sort-scalar": ("s", lambda s: (*s.sort(), *torch.sort(s, -1))),
    "argsort": ("x", lambda x: (x.argsort(), torch.argsort(x, 0, True), x.argsort(stable=True))),
    "var_mean": ("a", lambda a: (*torch.var_mean(a), *torch.var_mean(a, (0, 2), keepdim=True))),
    "var_mean-correction": ("a", lambda a: torch.var_mean(a, (0, 2), correction=0)),
    "var_mean-narrow": ("h", lambda h: torch.var_mean(h, 1, correction=2)),
    "std_mean": ("x", lambda x: (*torch.std_mean(x, 0), *torch.std_mean(x, -1, keepdim=True))),
    "count_nonzero": ("i", lambda i: (torch.count_nonzero(i - 1), (i > 0).count_nonzero(0))),
    "var": ("x", lambda x: (x.var(), x.var(0), torch.var(x, 1, keepdim=True), x.var(0, False))),
    "var-correction": ("a", lambda a: (torch.var(a, (0, 1), correction=0), a.var(correction=2))),
    "var-one": ("one", lambda x: (x.var(1), x.var(1, correction=2))),
    "std": ("x", lambda x: (x.std(), torch.std(x, 0), x.std(1, unbiased=False), x.std(0, True))),
    "logsumexp": ("x", lambda x: (x.logsumexp(1), torch.logsumexp(x * 400, 0, keepdim=True))),
    "logsumexp-nothing": ("p", lambda p: torch.logsumexp((p * 0).log(), (0, 1))),
    "norm": ("x", lambda x: (x.norm(), torch.norm(x, dim=1), x.norm(p=1, dim=0, keepdim=True))),
    "norm-orders": (
        "x", lambda x: [x.norm(p, 1) for p in (0, 0.5, 3, float("inf"), float("-inf"), "fro")]),
    "norm-dtype": ("h", lambda h: torch.linalg.vector_norm(h, dim=1, dtype=torch.float64)),
    # -- products
    "matmul": ("x w", lambda x, w: (x @ w, torch.matmul(x, w), x.matmul(w))),
    "mm": ("x w", lambda x, w: (torch.mm(x, w), x.mm(w))),
    "bmm": ("a b", lambda a, b: (torch.bmm(a, b), a.bmm(b))),
    "mv": ("x v", lambda x, v: (torch.mv(x, v), x.mv(v))),
    "dot": ("v v", lambda u, v: (torch.dot(u, v), u.dot(v))),
    "outer": ("u v", lambda u, v: (torch.outer(u, v), u.outer(v))),
    "addmm": ("x w", lambda x, w: torch.addmm(x[:, :3], x, w, beta=0.5, alpha=2)),
    "addmm-zero": ("x w", lambda x, w: torch.addmm(x[:, :3] / 0 * 0, x, w, beta=0)),
    "baddbmm": ("a b", lambda a, b: torch.baddbmm(a[:, :, 1:], a, b)),
    "addmv": ("u x v", lambda u, x, v: u.addmv(x, v, alpha=3)),
    "linear": ("a w", lambda a, w: (F.linear(a, w.t()), F.linear(a, w.T, w[0]))),
    "embedding": ("i w", lambda i, w: F.embedding(i.remainder(4), w)),
    # -- neural networks
    "softmax": ("x", lambda x: (x.softmax(0), torch.softmax(x, -1), F.softmax(x, dim=1))),
    "softmax-dtype": ("h", lambda h: (h.softmax(0, torch.float64), F.softmax(h, 1, dtype=h.dtype))),
    "log_softmax": ("x", lambda x: (x.log_softmax(-1), F.log_softmax(x, dim=0))),
    "softmin": ("x", lambda x: F.softmin(x, dim=1)),
    "glu": ("x", lambda x: F.glu(x)),
    "layer_norm": ("a v", lambda a, v: F.layer_norm(a, (4,), weight=v, eps=1e-3)),
    "rms_norm": ("a v", lambda a, v: (F.rms_norm(a, (4,), v, 1e-3), F.rms_norm(a, [5, 4]))),
    "normalize": ("x", lambda x: (F.normalize(x), F.normalize(x, p=1, dim=0))),
    "scaled_dot_product_attention": (
        "q", lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True)),
    "scaled_dot_product_attention-gqa": (
        "q k", lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)),
    "cross_entropy": (
        "x i", lambda x, i: (
            F.cross_entropy(x, i.remainder(4)[:, 0]),
            F.cross_entropy(x, i.remainder(4)[:, 1], reduction="none"),
            F.cross_entropy(x, i.remainder(4)[:, 2], reduction="sum", label_smoothing=0.25),
        ),
    ),
    "cross_entropy-ignored": (
        "x i", lambda x, i: (
            F.cross_entropy(x, i.remainder(4)[:, 0], ignore_index=1),
            F.cross_entropy(x, i[:, 0] * 0 - 100),
            F.cross_entropy(x, i[:, 0] * 0 + 9, ignore_index=9),
            F.cross_entropy(x, i.remainder(5)[:, 1] - 1, ignore_index=-1, reduction="none"),
            F.cross_entropy(x, i.remainder(4)[:, 2], ignore_index=0, label_smoothing=1.0),
        ),
    ),
    "cross_entropy-more dims": (
        "a i", lambda a, i: (
            F.cross_entropy(a, i[:2].remainder(5)),
            F.cross_entropy(a, i[:2].remainder(5), reduction="none", label_smoothing=0.5),
        ),
    ),
    "cross_entropy-vector": ("v i", lambda v, i: F.cross_entropy(v, i[0, 0].remainder(4))),
    "cross_entropy-probabilities": (
        "x y", lambda x, y: (
            F.cross_entropy(x, y.softmax(1)), F.cross_entropy(x, y, reduction="none"),
            F.cross_entropy(x, y.softmax(1), label_smoothing=0.5, reduction="sum"),
        ),
    ),
    "cross_entropy-narrow": ("h i", lambda h, i: F.cross_entropy(h, i.remainder(4)[:, 0])),
    "cross_entropy-infinite": (
        "x m", lambda x, m: F.cross_entropy(
            x.masked_fill(m, -float("inf")), x.argmax(1), reduction="none"),
    ),
    "mse_loss": ("x y", lambda x, y: (F.mse_loss(x, y), F.mse_loss(x, y, reduction="none"))),
    "l1_loss": ("x y", lambda x, y: (F.l1_loss(x, y), F.l1_loss(x, y, reduction="sum"))),
    # -- views
    "permute": ("a", lambda a: (a.permute(2, 0, 1), a.permute((0, 2, 1)))),
    "permute-torch": ("a", lambda a: torch.permute(a, (-1, 0, 1))),
    "transpose": ("a", lambda a: (a.transpose(0, 2), torch.transpose(a, 0, 1), a.mT)),
    "swapaxes": ("a", lambda a: (a.swapaxes(0, 2), torch.swapaxes(a, 0, 1))),
    "swapdims": ("a", lambda a: (a.swapdims(0, 2), torch.swapdims(a, 0, 1))),
    "t": ("x v", lambda x, v: (x.t(), torch.t(v), x.T)),
    "movedim": ("a", lambda a: (a.movedim(0, -1), torch.movedim(a, (0, 1), (2, 0)))),
    "moveaxis": ("a", lambda a: (a.moveaxis(0, -1), torch.moveaxis(a, 2, 0))),
    "reshape": ("a", lambda a: (a.reshape(10, 4), a.reshape((5, -1)), torch.reshape(a, (-1,)))),
    "view": ("a", lambda a: (a.view(10, 4), a.view(-1, 2), a.view(a.size(0), -1))),
    "view_as": ("a", lambda a: a.view_as(a.reshape(10, 4))),
    "reshape_as": ("a", lambda a: a.reshape_as(a.reshape(10, 4))),
    "flatten": ("a", lambda a: (a.flatten(), a.flatten(1), torch.flatten(a, 0, 1))),
    "ravel": ("a", lambda a: (a.ravel(), torch.ravel(a))),
    "unflatten": ("x", lambda x: (x.unflatten(1, (2, 2)), torch.unflatten(x, -1, (-1, 2)))),
    "unsqueeze": ("x", lambda x: (x.unsqueeze(0), torch.unsqueeze(x, -1), x[:, None])),
    "squeeze": ("one", lambda x: (x.squeeze(), x.squeeze(1), torch.squeeze(x, dim=(0, 1)))),
    "expand": ("one", lambda x: (x.expand(5, 3, 4), x.expand((2, -1, 3, -1)))),
    "expand_as": ("one a", lambda x, a: x[:1].expand_as(a)),
    "broadcast_to": (
        "one",
        lambda x: (torch.broadcast_to(x, (5, 3, 4)), x.broadcast_to((5, 2, 4))),
    ),
    "repeat": ("x", lambda x: (x.repeat(2, 1), x.repeat(2, 1, 3))),
    "repeat_interleave": ("x", lambda x: x.repeat_interleave(2, 1)),
    "repeat_interleave-flat": ("x", lambda x: torch.repeat_interleave(x, 3)),
    "contiguous": ("x", lambda x: x.t().contiguous().view(10, 2)),
    "clone": ("x", lambda x: (x.clone(), torch.clone(x))),
    "detach": ("x", lambda x: x.detach()),
    # -- parts
    "index": ("a", lambda a: (a[0], a[..., :3], a[:, -1], a[:, None], a[0, 1::2], a[1, ..., 0])),
    "select": ("a", lambda a: (a.select(1, -1), torch.select(a, 0, 1))),
    "narrow": ("a", lambda a: (a.narrow(1, 1, 3), torch.narrow(a, -1, -2, 2))),
    "split": ("a", lambda a: (*a.split(2, dim=1), *torch.split(a, [1, 3], dim=-1))),
    "chunk": ("a", lambda a: (*a.chunk(2, dim=-1), *torch.chunk(a, 3, 1), *a.chunk(9))),
    "unbind": ("a", lambda a: (*a.unbind(), *torch.unbind(a, -1))),
    "cat": ("x y", lambda x, y: (torch.cat([x, y]), torch.cat((x, y), dim=1))),
    "concat": ("x y", lambda x, y: torch.concat([x, y], -1)),
    "concatenate": ("x y", lambda x, y: torch.concatenate([x, y])),
    "stack": ("x y", lambda x, y: (torch.stack([x, y]), torch.stack((x, y), dim=-1))),
    # -- facts
    "facts-shape": ("a", lambda a: a.reshape(a.shape[0] * a.size(1), a.size(-1)) * len(a)),
    "facts-numel": ("a", lambda a: a * a.numel() + a.nelement() + a.dim() + a.ndim),
    "facts-torch": ("a", lambda a: a * torch.numel(a)),
    "facts-unpacked": ("a", lambda a: (lambda b, n, d: a.view(b * n, d))(*a.shape)),
    "facts-floating": ("a", lambda a: a if not torch.is_floating_point(a) else a + 1),
}  # fmt: skip

CASES |= surface_more.CASES

#: The pages of five requests, of one row each, and how many rows the requests have.
PAGES, LENGTHS = [[0, 2], [1, 3], [4, 4], [2, 0], [3, 1]], [2, 1, 2, 0, 2]


def paged_rows(x: torch.Tensor) -> torch.Tensor:
    """Each row of x [5,4] as the last one of a request, beside the rows in the request's pages."""
    rows = [
        x[torch.tensor(pages[:n], dtype=torch.int64)]
        for pages, n in zip(PAGES, LENGTHS, strict=True)
    ]
    made = [(q * 0.5 @ k.mT).softmax(-1) @ k for q, k in zip(x[:, None], rows, strict=True)]
    return torch.stack(made).unsqueeze(1)


#: Operations without an equal in torch: how the same is spelled there.
OWN: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "set": ("x", lambda ops, x: ops.set(x), lambda x: x),
    "cast": ("x", lambda ops, x: ops.cast(x, torch.float32), lambda x: x.to(torch.float32)),
    "slice": ("x", lambda ops, x: ops.slice(x, [1, 0], [5, 4], [2, 1]), lambda x: x[1:5:2]),
    "broadcast": ("x", lambda ops, x: ops.broadcast(x, [False, True, False]), lambda x: x[:, None]),
    "broadcast_in_dim": (
        "v", lambda ops, v: ops.broadcast_in_dim(v, (5, 4), (1,)), lambda v: v.expand(5, 4)),
    "stride_order": ("x", lambda ops, x: ops.stride_order(x, (0, 1)), lambda x: x),
    "paged_attention": ("x", lambda ops,
                        x: ops.paged_attention(*(ops.reshape(x, (5, 1, 1, 4)) for _ in range(3)),
                        ops.tensor(PAGES), ops.tensor(LENGTHS)), paged_rows),
    "attention": ("q y", lambda ops, q, y: ops.attention(q, q, q, is_causal=True, scale=0.5),
                  lambda q,
                  y: (F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5),
                  (q @ q.mT * 0.5).masked_fill(torch.ones(5, 5).triu(1) > 0,
                  float("-inf")).logsumexp(-1))),
    "attention-shared": ("q k", lambda ops, q, k: ops.attention(q, k, k, enable_gqa=True).output,
                         lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)),
    "attention-mask": ("q i", lambda ops, q, i: ops.attention(q, q, q, i[:, :1] > 0).output,
                       lambda q,
                       i: F.scaled_dot_product_attention(q, q, q, (i[:, :1] > 0).expand(5, 5))),
    "sum-none": ("x", lambda ops, x: ops.sum(x, dims=()), lambda x: x),
    "sum-dims": ("a", lambda ops, a: ops.sum(a, dims=[0, 2]), lambda a: a.sum((0, 2))),
    "squeeze-dims": ("one", lambda ops, x: ops.squeeze(x, dims=1), lambda x: x.squeeze(1)),
    "var-dims": ("a", lambda ops, a: ops.var(a, dims=(0, 1)), lambda a: a.var((0, 1))),
    "max-dims": ("x", lambda ops, x: ops.max(x, dims=[1]), lambda x: x.amax(1)),
    "min-dims": ("a", lambda ops, a: a.min((0, 2), True), lambda a: a.amin((0, 2), True)),
    "full": ("x", lambda ops,
             x: (x + ops.full((5, 4), 0.5), ops.full((3,), True), ops.full([2, 2], 3)),
             lambda x: (x + 0.5, torch.full((3,), True), torch.full((2, 2), 3))),
    "zeros": ("x", lambda ops,
              x: (ops.zeros(2, 3), ops.zeros((0, 4), dtype=torch.int8), x + ops.zeros(4)),
              lambda x: (torch.zeros(2, 3), torch.zeros((0, 4), dtype=torch.int8), x)),
    "ones": (
        "x", lambda ops, x: (ops.ones([5, 1]) * x, ops.ones(())), lambda x: (x, torch.ones(()))),
    "arange": ("x", lambda ops,
               x: (x * ops.arange(4), ops.arange(2, 9, 3), ops.arange(5, -4, -2), ops.arange(0.5,
               3), ops.arange(1, 2, 0.25, dtype=torch.float64), ops.arange(3, dtype=torch.int8),
               ops.arange(0), x + ops.arange(5)[:, None]),
               lambda x: (x * torch.arange(4), torch.arange(2, 9, 3), torch.arange(5, -4, -2),
               torch.arange(0.5, 3), torch.arange(1, 2, 0.25, dtype=torch.float64), torch.arange(3,
               dtype=torch.int8), torch.arange(0), x + torch.arange(5)[:, None])),
    "tensor": ("x", lambda ops,
               x: (x + ops.tensor([1.5, 2, 3, -1]), ops.tensor([[1, 2], [3, 4], [5, 6]]),
               ops.tensor(2), ops.tensor(torch.eye(5, 4)) * x, ops.tensor([True, False]),
               ops.tensor([0.5, 1], dtype=torch.half)),
               lambda x: (x + torch.tensor([1.5, 2, 3, -1]), torch.tensor([[1, 2], [3, 4], [5, 6]]),
               torch.tensor(2), torch.eye(5, 4) * x, torch.tensor([True, False]), torch.tensor([0.5,
               1], dtype=torch.half))),
}  # fmt: skip

OWN |= surface_more.OWN
