"""More programs in torch's own spelling, as in `surface_cases.py`, by family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

#: Operands that only these programs have.
SHAPES: dict[str, tuple[int, ...]] = {
    "sq": (2, 4, 4), "rs": (2, 4, 3), "r4": (4,),
    "img": (2, 4, 6, 5), "line": (2, 4, 7), "box": (1, 2, 4, 3, 4), "k1": (6, 4, 3),
    "k2": (6, 4, 3, 2), "k3": (2, 2, 2, 1, 2), "t2": (4, 6, 3, 2), "c4": (4,), "c6": (6,),
    "wi": (16, 4), "wh": (16, 4), "bi": (16,), "seq": (3, 2, 4), "wp": (12, 4), "wo": (4, 4),
    "cols": (2, 8, 6), "grid": (2, 3, 2, 2), "vec3": (5, 3), "tri": (3, 4, 4), "pc": (4,),
}  # fmt: skip
POSITIVE = {"pc"}

INF = float("inf")


def _grouped(ops: Any, x: Any) -> Any:
    """Five rows in two parts, of three experts; the fourth has none."""
    ids = ops.tensor([1, 0, 1, 3, 0])
    return ops.group_rows(x, ids, ops.counts(ids, 3, 2))


def _put_back(ops: Any, x: Any, ids: Any) -> Any:
    """The same, at most one of a part for an expert."""
    rows = ops.group_rows(x, ids, ops.counts(ids, 3, 2), capacity=1, drop=True)
    return ops.ungroup_rows(rows * 3, ids, ops.tensor([1.0, 2, 1, 1, 1]))


def dominant(x: Any) -> Any:
    """60 along the diagonal of matrices [4,4], which makes them regular."""
    return torch.diag_embed(torch.ones_like(x[..., 0]) * 60)


CASES: dict[str, tuple[str, Callable[..., Any]]] = {}
for _name in ("sgn", "sinc", "i0", "signbit", "lgamma", "digamma"):
    CASES[_name] = ("x", lambda x, n=_name: (getattr(torch, n)(x), getattr(x, n)()))
for _name in ("logaddexp", "hypot", "copysign", "fmax", "fmin"):
    CASES[_name] = ("x v", lambda x, v, n=_name: (getattr(torch, n)(x, v), getattr(v, n)(x)))

CASES |= {
    # -- elementwise
    "erfinv": ("p", lambda p: (torch.erfinv(p / 13), (p / 20).erfinv())),
    "i1": ("x", lambda x: torch.special.i1(x)),
    "arctan2": ("x y", lambda x, y: torch.arctan2(x, y)),
    "sinc-zero": ("x", lambda x: (torch.sinc(x * 0), torch.special.i1(x * 0))),
    "xlogy": ("x p", lambda x, p: (torch.xlogy(x, p), (x * 0).xlogy(p * 0), p.xlogy(2.0))),
    "nextafter": ("x y", lambda x, y: torch.nextafter(x.detach(), y.detach())),
    "heaviside": (
        "x v", lambda x, v: (torch.heaviside((x * 0).detach(), v.detach()),
                             x.detach().heaviside(v.detach()))),
    "bitwise_left_shift": ("i", lambda i: (i << 2, 1 << i % 5, torch.bitwise_left_shift(i, 1))),
    "bitwise_right_shift": ("i", lambda i: (i >> 1, 64 >> i % 5, i.bitwise_right_shift(i % 3))),
    "positive": ("x", lambda x: (x.positive(), torch.positive(x))),
    "deg2rad": ("x i", lambda x, i: (x.deg2rad(), torch.deg2rad(i))),
    "rad2deg": ("x i", lambda x, i: (x.rad2deg(), torch.rad2deg(i))),
    "logit": ("p", lambda p: (torch.logit(p / 13), torch.logit(p, eps=0.25), (p / 15).logit())),
    "isclose": (
        "x y i",
        lambda x, y, i: (
            torch.isclose(x, y, rtol=0.5), torch.isclose(x.log(), x.log(), equal_nan=True),
            i.isclose(i + 1, atol=1), torch.isclose(x / 0, x / 0),
        ),
    ),
    "tanhshrink": ("x", lambda x: F.tanhshrink(x)),
    "celu": ("x", lambda x: (F.celu(x, 0.5), torch.celu(x), F.celu(x - x, 2.0))),
    "prelu": ("x v", lambda x, v: (F.prelu(x, v), torch.prelu(x, v[:1]))),
    "prelu-more dims": ("img c4", lambda x, w: F.prelu(x, w)),
    "threshold": ("x", lambda x: (F.threshold(x, 0.5, 0.25), torch.threshold(x, -1, 2))),
    "hardshrink": ("x", lambda x: (F.hardshrink(x), x.hardshrink(1.5))),
    "softshrink": ("x", lambda x: (F.softshrink(x), F.softshrink(x, 1.5))),
    "fake_quantize_per_tensor_affine": (
        "x", lambda x: torch.fake_quantize_per_tensor_affine(x.float(), 0.25, 3, -8, 7)),
    "complex": (
        "x y",
        lambda x, y: (
            torch.view_as_real(torch.complex(x, y) * torch.complex(y, x)),
            torch.view_as_real(torch.complex(x, y).conj().resolve_conj()
                               if torch.is_tensor(x) else torch.complex(x, y).conj()),
        ),
    ),
    "polar": ("p x", lambda p, x: torch.view_as_real(torch.polar(p, x))),
    "view_as_complex": ("x", lambda x: torch.view_as_complex(x.reshape(5, 2, 2)).abs()),
    "view_as_real": ("x y", lambda x, y: torch.view_as_real(torch.complex(x, y))),
    "conj": ("x", lambda x: (x.conj() * 1, torch.conj(x) * 2)),
    "real": ("x y", lambda x, y: (torch.real(x) * 1, torch.real(torch.complex(x, y)) * 1)),
    "imag": ("x y", lambda x, y: torch.imag(torch.complex(x, y)) * 1),
    "angle": ("x y", lambda x, y: torch.angle(torch.complex(x, y))),
    # -- masks
    "tril": ("a m", lambda a, m: (a.tril(), torch.tril(a, 1), m.tril(-1), a.int().tril())),
    "triu": ("a m", lambda a, m: (a.triu(), torch.triu(a, -1), m.triu(1), (a / 0).triu())),
    "diagonal": (
        "a x m",
        lambda a, x, m: (
            a.diagonal(0, 1, 2) * 1, torch.diagonal(a, 1) * 1, x.diagonal(-2) * 1,
            m.diagonal(), x.diagonal(9) * 1, x.int().diagonal(dim1=1, dim2=0) * 1,
        ),
    ),
    "diag": ("x v", lambda x, v: (x.diag() * 1, torch.diag(v), torch.diag(v, -1), v.diag(2))),
    "diag_embed": (
        "x m", lambda x, m: (torch.diag_embed(x), x.diag_embed(1), torch.diag_embed(x, -1, 0, 2),
                             torch.diag_embed(m[0]))),
    "trace": ("x i", lambda x, i: (x.trace(), torch.trace(i))),
    "one_hot": ("i", lambda i: F.one_hot(i.remainder(4), 6)),
    "isin": ("i j", lambda i, j: (torch.isin(i, j[0]), torch.isin(i, j, invert=True))),
    "searchsorted": (
        "v x y",
        lambda v, x, y: (
            torch.searchsorted(v.sort()[0], x), torch.searchsorted(x.sort()[0], y, right=True),
            torch.searchsorted(v.sort()[0], v.sort()[0], side="right", out_int32=True),
        ),
    ),
    "bucketize": (
        "x v", lambda x, v: (torch.bucketize(x, v.sort()[0]),
                             torch.bucketize(v, v.sort()[0], right=True, out_int32=True))),
    "histc": ("x", lambda x: (torch.histc(x, 5, -2.0, 2.0), x.histc(3, 0, 1))),
    # -- elsewhere
    "tile": ("x", lambda x: (x.tile(2), torch.tile(x, (2, 1)), x.tile(2, 1, 1))),
    "flip": ("a", lambda a: (a.flip(0), torch.flip(a, (0, -1)), a.flip(2, 1))),
    "fliplr": ("x", lambda x: (x.fliplr(), torch.fliplr(x))),
    "flipud": ("x", lambda x: (x.flipud(), torch.flipud(x))),
    "roll": (
        "a", lambda a: (a.roll(1), torch.roll(a, (1, -2), (0, 2)), a.roll(7, 1), a.roll(0, 0))),
    "rot90": ("x", lambda x: [torch.rot90(x, k) for k in range(4)]),
    "pad": (
        "x",
        lambda x: (
            F.pad(x, (1, 2)), F.pad(x, (1, 0, 2, -1), value=0.5), F.pad(x, (-1, -1)),
            F.pad(x, (0, 3, -2, 0), "constant", -INF), F.pad(x, (0, 0)),
        ),
    ),
    "pad-modes": (
        "a",
        lambda a: (
            F.pad(a, (1, 2), mode="reflect"), F.pad(a, (2, 1), mode="replicate"),
            F.pad(a, (4, 1), mode="circular"), F.pad(a, (-1, 3), mode="replicate"),
        ),
    ),
    "pad-modes 2d": ("img", lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect")),
    "unfold": ("a", lambda a: (a.unfold(1, 3, 1), a.unfold(-1, 2, 2) * 1, a.unfold(1, 2, 3) * 1)),
    "diff": (
        "x y m", lambda x, y, m: (torch.diff(x), x.diff(dim=0, n=2), torch.diff(x, prepend=y),
                                  torch.diff(m), torch.diff(x, n=9))),
    "pixel_shuffle": ("img", lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": ("img", lambda x: F.pixel_unshuffle(x[..., :4], 2)),
    # -- side by side
    "atleast_1d": ("s x", lambda s, x: (torch.atleast_1d(s), *torch.atleast_1d(s, x))),
    "atleast_2d": ("s v x", lambda s, v, x: [torch.atleast_2d(y) for y in (s, v, x)]),
    "atleast_3d": ("s v x", lambda s, v, x: torch.atleast_3d(s, v, x)),
    "hstack": ("x y v", lambda x, y, v: (torch.hstack([x, y]), torch.hstack((v, v)))),
    "vstack": ("x y v", lambda x, y, v: (torch.vstack([x, y, v]), torch.vstack((v, v)))),
    "row_stack": ("x y", lambda x, y: torch.row_stack([x, y])),
    "dstack": ("x y v", lambda x, y, v: (torch.dstack([x, y]), torch.dstack((v, v)))),
    "column_stack": ("x u", lambda x, u: torch.column_stack([x, u, x])),
    "tensor_split": (
        "a", lambda a: (*a.tensor_split(3, 1), *torch.tensor_split(a, (1, 4), 1),
                        *a.tensor_split(4), *torch.tensor_split(a, (3, 1), dim=2))),
    "meshgrid": (
        "u v s", lambda u, v, s: (*torch.meshgrid(u, v, indexing="ij"),
                                  *torch.meshgrid([u, v, s], indexing="xy"))),
    "broadcast_tensors": ("x v one", lambda x, v, one: torch.broadcast_tensors(x, v, one)),
    "block_diag": ("x v s", lambda x, v, s: torch.block_diag(x, v, s)),
    "kron": ("x w v", lambda x, w, v: (torch.kron(x, w), x.kron(v))),
    # -- along a dim
    "cumsum": ("a i", lambda a, i: (a.cumsum(0), torch.cumsum(a, -1), i.cumsum(1),
                                    i.cumsum(1, dtype=torch.float32))),
    "cumprod": ("a", lambda a: (a.cumprod(0), torch.cumprod(a, 1))),
    "cumprod-zeros": ("x i", lambda x, i: (x * (i % 2)).cumprod(0)),
    "logcumsumexp": ("a", lambda a: (a.logcumsumexp(1), torch.logcumsumexp(a * 200, 0))),
    "cummax": ("x i", lambda x, i: (*torch.cummax(x, 0), *x.cummax(-1), *(i % 2).cummax(0))),
    "cummin": ("x i", lambda x, i: (*torch.cummin(x, 0), *x.cummin(-1), *(i % 2).cummin(0))),
    "kthvalue": ("x", lambda x: (*x.kthvalue(2), *torch.kthvalue(x, 3, 0, True))),
    "median": ("x", lambda x: (x.median(), *x.median(1), *torch.median(x, 0, True))),
    "median-nan": ("x", lambda x: (x.log().median(), *x.log().median(0))),
    "nanmedian": ("x", lambda x: (x.log().nanmedian(), x.nanmedian(1).values)),
    "mode": ("i", lambda i: (torch.mode(i % 3, 1).values, (i % 3).mode(0, True)[0])),
    "quantile": (
        "x", lambda x: (x.quantile(0.3), torch.quantile(x, 0.5, 1), x.quantile(1.0, 0, True),
                        x.quantile(0.4, 1, interpolation="midpoint"), x.log().quantile(0.2, 0))),
    "quantile-ways": (
        "x", lambda x: [x.quantile(0.4, 0, interpolation=way)
                        for way in ("lower", "higher", "nearest")]),
    "nansum": ("x i", lambda x, i: (x.log().nansum(), torch.nansum(x.log(), 1), i.nansum(0))),
    "nanmean": ("x", lambda x: (x.log().nanmean(), torch.nanmean(x.log(), 0, True))),
    "aminmax": ("x", lambda x: (*torch.aminmax(x), *x.aminmax(dim=0, keepdim=True))),
    "renorm": ("a", lambda a: (torch.renorm(a, 2, 0, 1.0), a.renorm(1, -1, 100.0))),
    # -- by indices
    "index_select": (
        "x m i",
        lambda x, m, i: (
            x.index_select(0, i[0].remainder(5)), torch.index_select(x, -1, i[:, 0].remainder(4)),
            m.index_select(1, i[0].remainder(4)), x.index_select(0, i[0, :1].int().remainder(5)),
        ),
    ),
    "index-tensors": (
        "x a i",
        lambda x, a, i: (
            x[i.remainder(5)], x[:, i[0] % 4 - 4], a[i[0] % 2, :, i[0] % 4], a[0, i[:, :2] % 5],
            a[i[0] % 2, i[0] % 5, None], a[..., i[0] % 4], x[[0, -1]], a[:, i[:, :1] % 5, i[0] % 4],
        ),
    ),
    "gather": (
        "x m i",
        lambda x, m, i: (
            x.gather(1, i.remainder(4)), torch.gather(x, 0, i[:3, :2].remainder(5)),
            m.gather(0, i.remainder(5)),
        ),
    ),
    "take_along_dim": (
        "x i",
        lambda x, i: (
            torch.take_along_dim(x, x.argsort(1), 1), x.take_along_dim(i[:, :1].remainder(5), 0),
            x.take_along_dim(i.remainder(20)),
        ),
    ),
    "take": ("x i", lambda x, i: (torch.take(x, i.remainder(20)), x.take(i[0].remainder(20) - 20))),
    "scatter": (
        "x y i m",
        lambda x, y, i, m: (
            x.scatter(1, y.argsort(1), y), torch.scatter(x, 0, i[:1].remainder(5), 1.5),
            x.scatter(0, i[:1, :3].remainder(5), y[:1, :3]), m.scatter(1, y.argsort(1)[:, :2], ~m),
        ),
    ),
    "scatter-added": ("i", lambda i: i.scatter(0, i.remainder(5), i, reduce="add")),
    "scatter_add": (
        "x y i", lambda x, y, i: (x.scatter_add(0, i.remainder(5), y),
                                  torch.scatter_add(x, 1, i[:4].remainder(4), y[:4]))),
    "scatter_reduce": (
        "x y i",
        lambda x, y, i: (
            x.scatter_reduce(0, i.remainder(5), y, "sum"),
            torch.scatter_reduce(x, 1, i.remainder(4), y, reduce="amax"),
            x.scatter_reduce(1, i.remainder(4), y, "amin", include_self=False),
            x.scatter_reduce(0, i.remainder(5), y, "prod"),
            x.scatter_reduce(0, i.remainder(2), y, "mean", include_self=False),
            x.scatter_reduce(0, i.remainder(5), y, "mean"),
        ),
    ),
    "index_add": (
        "x y i", lambda x, y, i: (x.index_add(0, i[:, 0].remainder(5), y, alpha=0.5),
                                  torch.index_add(x, 1, i[0].remainder(4), y))),
    "index_copy": (
        "x y", lambda x, y: (x.index_copy(0, y[:, 0].argsort()[:3], y[:3]),
                             torch.index_copy(x, 1, y[0].argsort(), y))),
    "index_fill": ("x i", lambda x, i: (x.index_fill(0, i[0].remainder(5), 2.5),
                                        torch.index_fill(x, 1, i[0, 0].remainder(4), -1))),
    "index_put": (
        "x y",
        lambda x, y: (
            x.index_put((y[:, 0].argsort()[:3],), y[:3]),
            torch.index_put(x, (y[:4, 0].argsort(), y[0].argsort() - 4), y[0]),
            x.index_put((y[:, 1].argsort() % 2,), y, accumulate=True),
        ),
    ),
    "masked_scatter": ("x y m", lambda x, y, m: (x.masked_scatter(m, y),
                                                 torch.masked_scatter(x, m[0], y))),
    "slice_scatter": (
        "x y", lambda x, y: (torch.slice_scatter(x, y[:2], 0, 1, 3), x.slice_scatter(y, 0),
                             x.slice_scatter(y[:, :2], 1, 0, 4, 2),
                             x.slice_scatter(y[:0], 0, 3, 3))),
    "select_scatter": ("x y", lambda x, y: (torch.select_scatter(x, y[0], 0, 2),
                                            x.select_scatter(y[:, 0], 1, -1))),
    "embedding-padding": ("i w", lambda i, w: F.embedding(i.remainder(4), w, padding_idx=-1)),
    "embedding_bag": (
        "i w", lambda i, w: [F.embedding_bag(i.remainder(4), w, mode=mode)
                             for mode in ("mean", "sum", "max")]),
    "embedding_bag-weighed": (
        "i w x", lambda i, w, x: F.embedding_bag(
            i.remainder(4), w, mode="sum", per_sample_weights=x)),
    # -- products
    "einsum": (
        "a b x",
        lambda a, b, x: (
            torch.einsum("bij,bjk->bik", a, b), torch.einsum("bij,bjk,il->lk", a, b, x),
            torch.einsum("...i->...", a), torch.einsum("ij,kj", x, x), torch.einsum("ij->ji", x),
            torch.einsum("bij,bjk->", [a, b]), torch.einsum("ij,j->ij", x, x[0]),
            torch.einsum("...ij,...jk->...ik", a, b), torch.einsum("i,j", x[0], x[1]),
        ),
    ),
    "einsum-repeated": (
        "wo tri", lambda w, t: (torch.einsum("ii->i", w), torch.einsum("bii->b", t),
                                torch.einsum("ii,ij->j", w, w))),
    "einsum-ones": ("one x", lambda one, x: torch.einsum("ijk,lk->ilj", one, x)),
    "tensordot": (
        "a b x", lambda a, b, x: (torch.tensordot(a, b[0], 1),
                                  torch.tensordot(a, b, dims=([0, 2], [0, 1])),
                                  torch.tensordot(x, x, 2), torch.tensordot(x[0], x[1], 0))),
    "inner": (
        "x y v s", lambda x, y, v, s: (torch.inner(x, y), v.inner(v), x.inner(v), s.inner(x))),
    "vdot": ("v", lambda v: (torch.vdot(v, v), v.vdot(v + 1))),
    "chain_matmul": ("x w v", lambda x, w, v: (torch.linalg.multi_dot([x.T, x, w]),
                                               torch.linalg.multi_dot([v, w, w.T, v]))),
    "bilinear": ("x y tri", lambda x, y, t: (F.bilinear(x, y, t), F.bilinear(x, y, t, t[:, 0, 0]))),
    "inverse": ("sq", lambda x: (torch.inverse(x + dominant(x)), (x - dominant(x)).inverse(),
                                 torch.linalg.inv(x[0] + dominant(x[0])))),
    "linalg_solve": (
        "sq rs r4", lambda x, y, v: (torch.linalg.solve(x + dominant(x), y),
                                     torch.linalg.solve(x + dominant(x), v.expand(2, 4)),
                                     torch.linalg.solve(x[0] + dominant(x[0]), v),
                                     torch.linalg.solve(x[0] + dominant(x[0]), y[1]))),
    "cholesky": (
        "sq", lambda x: (torch.linalg.cholesky(x @ x.mT + dominant(x)),
                         torch.linalg.cholesky(x[0] @ x[0].T + dominant(x[0]), upper=True))),
    # -- distances
    "cosine_similarity": (
        "x y", lambda x, y: (F.cosine_similarity(x, y), torch.cosine_similarity(x, y, dim=0))),
    "pairwise_distance": (
        "x y", lambda x, y: (F.pairwise_distance(x, y), F.pairwise_distance(x, y, 1, 0.0, True))),
    "cdist": ("x y a", lambda x, y, a: (torch.cdist(x, y), torch.cdist(x, y, p=1.0),
                                        torch.cdist(a, y, p=INF))),
    "vector_norm": ("a", lambda a: (torch.linalg.vector_norm(a, 3, (0, 2)),
                                    torch.linalg.vector_norm(a), torch.linalg.norm(a, dim=1))),
    "matrix_norm": (
        "a x",
        lambda a, x: (
            torch.linalg.matrix_norm(a), torch.linalg.norm(x), torch.linalg.norm(x, 1),
            *(torch.linalg.matrix_norm(a, o, keepdim=True) for o in (1, INF, -INF)),
            torch.linalg.norm(a, "fro", (0, 1)),
        ),
    ),
    "cross": ("vec3", lambda x: (torch.linalg.cross(x, x.roll(1, 0)), torch.cross(x, x.flip(0), 1),
                                 x.cross(x * x))),
    # -- norms
    "group_norm": ("img c4", lambda x, c: (F.group_norm(x, 2), F.group_norm(x, 4, c, c, eps=1e-2))),
    "batch_norm": (
        "img c4 pc", lambda x, c, p: (
            F.batch_norm(x, c.detach(), p.detach()),
            F.batch_norm(x, c.detach(), p.detach(), c, c, eps=1e-2),
            F.batch_norm(x, None, None, c, training=True))),
    "instance_norm": (
        "img c4", lambda x, c: (F.instance_norm(x), F.instance_norm(x, weight=c, bias=c))),
    "local_response_norm": (
        "img", lambda x: (F.local_response_norm(x, 2), F.local_response_norm(x, 3, k=2.0))),
    # -- losses
    "nll_loss": (
        "x i v a",
        lambda x, i, v, a: (
            F.nll_loss(x, i[:, 0] % 4), F.nll_loss(x, i[:, 1] % 4, ignore_index=1, reduction="sum"),
            F.nll_loss(x, i[:, 2] % 4, v.detach()), F.nll_loss(a, i[:2] % 5, reduction="none"),
        ),
    ),
    "binary_cross_entropy": (
        "p x", lambda p, x: (F.binary_cross_entropy(p / 13, (x > 0).double()),
                             F.binary_cross_entropy(p / 13, p / 15, x.detach(), reduction="none"))),
    "binary_cross_entropy_with_logits": (
        "x p v", lambda x, p, v: (F.binary_cross_entropy_with_logits(x * 9, p / 5),
                                  F.binary_cross_entropy_with_logits(
                                      x, p / 5, pos_weight=v.detach(), reduction="sum"))),
    "smooth_l1_loss": ("x y", lambda x, y: (F.smooth_l1_loss(x, y),
                                            F.smooth_l1_loss(x, y, beta=0.5, reduction="sum"))),
    "huber_loss": ("x y", lambda x, y: (F.huber_loss(x, y),
                                        F.huber_loss(x, y, delta=2.5, reduction="none"))),
    "kl_div": (
        "x p", lambda x, p: (
            F.kl_div(x, p, reduction="batchmean"), F.kl_div(x, p, reduction="sum"),
            F.kl_div(x, p.log(), log_target=True, reduction="none"))),
    "triplet_margin_loss": (
        "x y p", lambda x, y, p: (F.triplet_margin_loss(x, y, p), F.triplet_margin_loss(
            x, y, p, margin=3.5, swap=True, reduction="none"))),
    "margin_ranking_loss": ("x y p", lambda x, y, p: F.margin_ranking_loss(x, y, p, margin=0.5)),
    "cosine_embedding_loss": (
        "x y i", lambda x, y, i: (
            F.cosine_embedding_loss(x, y, i[:, 0].sign()),
            F.cosine_embedding_loss(x, y, i[:, 1].sign(), 0.2, reduction="sum"))),
    "hinge_embedding_loss": ("x i", lambda x, i: F.hinge_embedding_loss(x, i.sign(), margin=2.0)),
    "soft_margin_loss": ("x y", lambda x, y: F.soft_margin_loss(x, y.detach())),
    "poisson_nll_loss": ("x p", lambda x, p: (F.poisson_nll_loss(x, p), F.poisson_nll_loss(
        p, p, log_input=False, full=True, reduction="sum"))),
    # -- cells
    "lstm_cell": (
        "x y wi wh bi", lambda x, y, wi, wh, b: (*torch.lstm_cell(x, (y, y * 0.5), wi, wh, b, b),
                                                 *torch.lstm_cell(x, (y, y), wi, wh))),
    "gru_cell": (
        "x y wi wh bi",
        lambda x, y, wi, wh, b: torch.gru_cell(x, y, wi[:12], wh[:12], b[:12], b[4:])),
    "rnn_tanh_cell": ("x y wo", lambda x, y, w: torch.rnn_tanh_cell(x, y, w, w.T)),
    "rnn_relu_cell": ("x y wo", lambda x, y, w: torch.rnn_relu_cell(x, y, w, w.T)),
    "multi_head_attention_forward": (
        "seq wp wo", lambda x, wp, wo: F.multi_head_attention_forward(
            x, x, x, 4, 2, wp, wp[:, 0], None, None, False, 0.0, wo, wo[0], training=False)),
    "multi_head_attention_forward-fast": (
        "seq wp wo", lambda x, wp, wo: F.multi_head_attention_forward(
            x, x + 1, x, 4, 2, wp, None, None, None, False, 0.0, wo, None, need_weights=False)[0]),
    # -- convolutions
    "conv1d": (
        "line k1 c6",
        lambda x, w, b: (
            F.conv1d(x, w), F.conv1d(x, w, b, 2, 1), F.conv1d(x[0], w, padding="same", dilation=2),
            F.conv1d(x, w[:, :2], groups=2),
        ),
    ),
    "conv2d": (
        "img k2 c6",
        lambda x, w, b: (
            F.conv2d(x, w), F.conv2d(x, w, b, stride=2, padding=(1, 0)),
            F.conv2d(x, w[:, :2], groups=2, dilation=(1, 2)), F.conv2d(x, w, stride=(3, 2)),
            F.conv2d(x, w[:4, :1], groups=4),
        ),
    ),
    "conv3d": (
        "box k3", lambda x, w: (F.conv3d(x, w), F.conv3d(x, w, padding=1, stride=(1, 2, 1)))),
    "conv_transpose1d": ("line k1", lambda x, w: F.conv_transpose1d(x, w[:4], stride=2)),
    "conv_transpose2d": (
        "img t2 c6", lambda x, w, b: (F.conv_transpose2d(x, w), F.conv_transpose2d(
            x, w, b, stride=2, padding=1, output_padding=1), F.conv_transpose2d(x, w, groups=2))),
    "conv_transpose3d": ("box k3", lambda x, w: F.conv_transpose3d(x, w, dilation=2)),
    "max_pool1d": ("line", lambda x: (F.max_pool1d(x, 2), F.max_pool1d(x[0], 3, 1, 1))),
    "max_pool2d": (
        "img", lambda x: (F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
                          *F.max_pool2d(x, (2, 3), 1, return_indices=True))),
    "max_pool3d": ("box", lambda x: F.max_pool3d(x, 2, 1)),
    "avg_pool1d": ("line", lambda x: (F.avg_pool1d(x, 2), F.avg_pool1d(x, 3, 2, 1, True, False))),
    "avg_pool2d": (
        "img", lambda x: (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1),
                          F.avg_pool2d(x, 3, 2, 1, True),
                          F.avg_pool2d(x, (3, 2), 1, 1, count_include_pad=False),
                          F.avg_pool2d(x, 2, divisor_override=3))),
    "avg_pool3d": ("box", lambda x: F.avg_pool3d(x, 2, 1)),
    "adaptive_avg_pool1d": ("line", lambda x: F.adaptive_avg_pool1d(x, 3)),
    "adaptive_avg_pool2d": (
        "img", lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, 2)),
                          F.adaptive_avg_pool2d(x, (None, 4)))),
    "adaptive_avg_pool3d": ("box", lambda x: F.adaptive_avg_pool3d(x, 2)),
    "adaptive_max_pool1d": ("line", lambda x: F.adaptive_max_pool1d(x, 3)),
    "adaptive_max_pool2d": ("img", lambda x: F.adaptive_max_pool2d(x, (4, 2))),
    "adaptive_max_pool3d": ("box", lambda x: F.adaptive_max_pool3d(x, 2)),
    "im2col": ("img", lambda x: (F.unfold(x, 3), F.unfold(x, 2, padding=1, stride=2))),
    "col2im": ("cols", lambda x: (F.fold(x, (4, 6), 2, stride=2), F.fold(x, (3, 4), 2))),
    "interpolate": (
        "img",
        lambda x: (
            F.interpolate(x, scale_factor=2), F.interpolate(x, size=(4, 7)),
            F.interpolate(x, scale_factor=1.5, mode="bilinear"),
            F.interpolate(x, (4, 7), mode="bilinear", align_corners=True),
            F.interpolate(x, scale_factor=0.8, mode="bicubic"),
            F.interpolate(x, (2, 9), mode="bilinear", antialias=True),
            F.interpolate(x, (3, 3), mode="nearest-exact"), F.interpolate(x, (3, 2), mode="area"),
        ),
    ),
    "interpolate-line": ("line", lambda x: F.interpolate(x, 5, mode="linear")),
    "grid_sample": (
        "img grid",
        lambda x, g: (
            F.grid_sample(x, g / 3, align_corners=False),
            F.grid_sample(x, g / 3, padding_mode="border", align_corners=True),
            F.grid_sample(x, g / 5, mode="nearest", align_corners=False),
        ),
    ),
}  # fmt: skip

#: Operations whose name in torch is not a function of values: how the same is spelled there.
OWN: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "eye": (
        "x", lambda ops, x: (ops.eye(5, 4) * x, ops.eye(3, dtype=torch.int64)),
        lambda x: (torch.eye(5, 4) * x, torch.eye(3, dtype=torch.int64))),
    "linspace": (
        "x", lambda ops, x: (x + ops.linspace(0, 1, 4), ops.linspace(2, -1, 7, dtype=torch.float64),
                             ops.linspace(1, 5, 1), ops.linspace(0, 1, 0)),
        lambda x: (x + torch.linspace(0, 1, 4), torch.linspace(2, -1, 7, dtype=torch.float64),
                   torch.linspace(1, 5, 1), torch.linspace(0, 1, 0))),
    "scalar_tensor": (
        "x", lambda ops, x: x * ops.scalar_tensor(2.5), lambda x: x * torch.scalar_tensor(2.5)),
    "tril_indices": (
        "x", lambda ops, x: ops.tril_indices(4, 6, -1), lambda x: torch.tril_indices(4, 6, -1)),
    "triu_indices": (
        "x", lambda ops, x: ops.triu_indices(4, 6, 2), lambda x: torch.triu_indices(4, 6, 2)),
    "grouped_mm": (
        "x sq", lambda ops, x, w: ops.grouped_mm(x, w, ops.tensor([2, 4])),
        lambda x, w: torch.cat([x[:2] @ w[0], x[2:4] @ w[1], torch.zeros_like(x[4:])])),
    "routed_mm": (
        "x sq",
        lambda ops, x, w: ops.routed_mm(x, ops.unsqueeze(w, 0), ops.tensor([1, 0, 1, 2, 0])),
        lambda x, w: torch.stack(  # of the third matrix there is none
            [x[i] @ w[n] if n < 2 else 0 * x[i] for i, n in enumerate((1, 0, 1, 2, 0))])[None]),
    "counts": (
        "x", lambda ops, x: ops.counts(ops.tensor([1, 0, 1, 3, 0]), 3, 2),
        lambda x: torch.tensor([[1, 2, 0], [1, 0, 0]])),
    "group_rows": (
        "x", lambda ops, x: _grouped(ops, x).sum(2),
        lambda x: torch.stack(
            [x[1], x[0] + x[2], 0 * x[0], x[4], 0 * x[0], 0 * x[0]]).view(2, 3, 4)),
    "ungroup_rows": (
        "x", lambda ops, x: _put_back(ops, x, ops.tensor([1, 0, 1, 3, 0])),
        lambda x: x * torch.tensor([3.0, 6, 0, 0, 3]).unsqueeze(1)),
    "empty": ("x", lambda ops, x: x + ops.empty(5, 4), lambda x: x),
    "empty_like": ("x", lambda ops, x: x + torch.empty_like(x), lambda x: x),
    "new_empty": ("x", lambda ops, x: x + x.new_empty(5, 4), lambda x: x),
}  # fmt: skip
