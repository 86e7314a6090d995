"""Normalisations over groups of channels, over batches, over instances, over neighbours."""

from __future__ import annotations

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import moves, parts, views
from mdfuse.frontend.ops.pointwise import ROWS
from mdfuse.frontend.ops.recording import again, back, in_f32, shown
from mdfuse.frontend.ops.reductions import mean


def _standard(x: Handle, over: tuple[int, ...], eps: float) -> Handle:
    """Return x minus its mean over dims, divided by its standard deviation, in at least 32 bits."""
    with again(x):
        wide = in_f32(x)
    centre = mean(wide, over, True)
    with again(x, is_more=True):
        far = wide - centre
    scale = ROWS["rsqrt"](mean(far * far, over, True) + eps)
    with again(x, is_more=True):
        return far * scale


def _scaled(x: Handle, weight: Handle | None, bias: Handle | None) -> Handle:
    """Return x scaled and shifted by a number for each place of dim 1."""
    shape = (-1, *(1,) * (x.ndim - 2))
    x = x if weight is None else x * views.reshape(weight, shape)
    return x if bias is None else x + views.reshape(bias, shape)


def _check_channels(name: str, x: Handle, *factors: Handle | None) -> None:
    """Raise DefinitionError unless weight and bias have a number for each place of dim 1."""
    given = [f for f in factors if f is not None]
    fits = x.ndim > 1 and x.dtype.is_floating_point
    if not fits or any(f.shape != x.shape[1:2] for f in given):
        raise DefinitionError(
            f"{name} of {shown(x)}" + "".join(f" with {shown(f)}" for f in given),
            because="x is floating, [batch, channels, …]; the others have a number per channel",
            hint=f"vectors of {x.shape[1]}" if x.ndim > 1 else "x: [batch, channels, …]",
        )


def group_norm(
    x: Handle,
    num_groups: int,
    weight: Handle | None = None,
    bias: Handle | None = None,
    eps: float = 1e-5,
) -> Handle:
    """Each group of channels of each row less its mean, by its standard deviation.

    Args:
        x: [batch, channels, …]; batch and whole groups of channels may be split.
        num_groups: how many groups the channels are in.
        weight, bias: a factor and a number for each channel.
        eps: added to the variance.
    """
    _check_channels("group_norm", x, weight, bias)
    if num_groups < 1 or x.shape[1] % num_groups:
        raise DefinitionError(
            f"group_norm of {shown(x)} with {num_groups} groups",
            because="the channels are in groups of one size",
            hint="a divisor of the channels",
        )
    apart = views.reshape(x, (x.shape[0], num_groups, x.shape[1] // num_groups, *x.shape[2:]))
    normal = _standard(apart, tuple(range(2, apart.ndim)), eps)
    with again(x, is_more=True):
        normal = views.reshape(normal, x.shape)
    return back(_scaled(normal, weight, bias), x)


def batch_norm(
    x: Handle,
    running_mean: Handle | None,
    running_var: Handle | None,
    weight: Handle | None = None,
    bias: Handle | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Handle:
    """x less a mean, by a standard deviation, for each channel: those that are given.

    In training mean and variance are those of x; running ones are refused then, because values of a
    fusion are not updated.

    Args:
        x: [batch, channels, …]; every dim may be split.
        running_mean, running_var: of each channel.
        weight, bias: a factor and a number for each channel.
        training: whether mean and variance are those of x.
        momentum: of the update of running ones; there is none here.
        eps: added to the variance.
    """
    _check_channels("batch_norm", x, running_mean, running_var, weight, bias)
    if training != (running_mean is None) or (running_mean is None) != (running_var is None):
        raise DefinitionError(
            f"batch_norm of {shown(x)} with training={training}, "
            f"{'with' if running_mean is not None else 'without'} running ones",
            because="running mean and variance are read, or those of x are taken: values are not "
            "updated in place",
            hint="training=False, or None for both and an update of your own by var_mean",
        )
    if running_mean is None or running_var is None:
        over = tuple(d for d in range(x.ndim) if d != 1)
        return back(_scaled(_standard(x, over, eps), weight, bias), x)
    shape = (-1, *(1,) * (x.ndim - 2))
    scale = views.reshape(ROWS["rsqrt"](in_f32(running_var) + eps), shape)
    centre = views.reshape(running_mean, shape)
    with again(x):
        normal = (in_f32(x) - centre) * scale
    return back(_scaled(normal, weight, bias), x)


def instance_norm(
    x: Handle,
    running_mean: Handle | None = None,
    running_var: Handle | None = None,
    weight: Handle | None = None,
    bias: Handle | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Handle:
    """Each channel of each row less its mean, by its standard deviation.

    Args:
        x: [batch, channels, …]; every dim may be split.
        running_mean, running_var: taken with use_input_stats=False: `batch_norm`.
        weight, bias: a factor and a number for each channel.
        use_input_stats: whether mean and variance are those of x.
        momentum: of the update of running ones; there is none here.
        eps: added to the variance.
    """
    if not use_input_stats:
        return batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
    _check_channels("instance_norm", x, weight, bias)
    if running_mean is not None or running_var is not None or x.ndim < 3:
        raise DefinitionError(
            f"instance_norm of {shown(x)} with running ones, or without a dim to normalise",
            because="running mean and variance are not updated in place",
            hint="None for both",
        )
    return back(_scaled(_standard(x, tuple(range(2, x.ndim)), eps), weight, bias), x)


def local_response_norm(
    x: Handle, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Handle:
    """x divided by (k + alpha * the mean square of its neighbours among the channels) ** beta.

    Args:
        x: [batch, channels, …]; the channels are whole on every rank.
        size: how many neighbours count.
        alpha, beta, k: see above.
    """
    if x.ndim < 3 or size < 1 or not x.dtype.is_floating_point:
        raise DefinitionError(
            f"local_response_norm of {shown(x)} with size={size}",
            because="x is floating, [batch, channels, …], and one neighbour at least counts",
            hint="x: [batch, channels, width]",
        )
    wide = in_f32(x)
    unpadded = [0] * (2 * (x.ndim - 2))
    square = moves.pad(wide * wide, [*unpadded, size // 2, (size - 1) // 2])
    total = None
    for i in range(size):
        part = parts.narrow(square, 1, i, x.shape[1])
        total = part if total is None else total + part
    assert total is not None
    return back(wide / (total * (alpha / size) + k) ** beta, x)
