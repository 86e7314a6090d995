"""Tables of costs in files: the machine and the errors of each, and the one that counts here.

A local calibration goes before the tables that ship with the package. A file that is damaged, or of
another machine, is left alone, and the reason is told.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch

from mdfuse.errors import ProgramError
from mdfuse.interpreter.json_text import from_json
from mdfuse.seeing.cost_keys import links_of, works_of
from mdfuse.seeing.costs import Costs, Link
from mdfuse.seeing.curves import Curve, Grid
from mdfuse.torch_private import cache_folder

_LOG = logging.getLogger("mdfuse.costs")

#: The format that files declare.
FORMAT = "mdfuse costs 1"

#: Keys of earlier files, of a table and of its costs, which are left out: timelines no longer model
#: the caches and the clock of a processor.
_RETIRED = frozenset(("pace_s", "caches", "switch_s"))

#: Where tables are that ship with the package, in it.
_SHIPPED = "seeing/tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine on which costs depend.

    Attributes:
        device: the name of the GPU, or of the processor.
        link: the way its ranks communicate: "host": within a processor's host; "peer": GPUs that
            reach each other's memory; "alone": one GPU; "network": several hosts.
        backend: which library.
        threads: of torch, on a CPU; 0 on a GPU.
        versions: of the libraries that compute and communicate.
    """

    device: str
    link: str
    backend: str
    threads: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The device, the link and the backend, for people."""
        threads = f", {self.threads} threads" if self.threads else ""
        return f"{self.device} ({self.link}, {self.backend}{threads})"


def machine_of(device: torch.device, backend: str, is_one_host: bool = True) -> Machine:
    """Return the machine of this process.

    Args:
        device: which computes.
        backend: which communicates.
        is_one_host: whether all ranks are on this host.
    """
    versions = {"torch": str(torch.__version__)}
    if device.type != "cuda":
        link = "host" if is_one_host else "network"
        threads = torch.get_num_threads()
        return Machine(
            device=processor(), link=link, backend=backend, threads=threads, versions=versions
        )
    versions["cuda"] = str(torch.version.cuda)
    if torch.distributed.is_nccl_available():
        nccl: Any = torch.cuda.nccl
        versions["nccl"] = ".".join(map(str, nccl.version()))
    name = torch.cuda.get_device_name(device)
    return Machine(
        device=name, link=_gpu_link(is_one_host), backend=backend, threads=0, versions=versions
    )


def _gpu_link(is_one_host: bool) -> str:
    if not is_one_host:
        return "network"
    if torch.cuda.device_count() < 2:
        return "alone"
    return "peer" if torch.cuda.can_device_access_peer(0, 1) else "host"


@cache
def processor() -> str:
    """Return the model's name; `platform` does not know it on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """A table of costs, and where it is from.

    Attributes:
        costs: the table.
        machine: that it was measured on.
        ranks: how many took part.
        date: when, as 2026-11-23.
        mean_error: of programs that it was not fitted to: 0.05 for 5 %.
        p95_error: the 95th percentile of these errors.
        held_out: name of each such program -> predicted and measured seconds.
        spread: between the quartiles of repeated times of the same work, during the measurement.
        is_default: whether it ships with the package.
    """

    costs: Costs
    machine: Machine
    ranks: int
    date: str
    mean_error: float
    p95_error: float
    held_out: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    spread: float = 0.0
    is_default: bool = False

    def by(self, backend: str) -> CostTable:
        """Return the table for programs of a backend, where it has costs of that one."""
        usual = self.machine.backend
        costs = self.costs.by(backend, usual) if backend != usual else None
        if costs is None:
            return self
        table = replace(self, machine=replace(self.machine, backend=backend), costs=costs)
        return replace(table, costs=replace(costs, name=table.text))

    @property
    def text(self) -> str:
        """A description in a line."""
        kind = "default" if self.is_default else "calibrated"
        error = f"off by {self.mean_error:.0%} on average"
        return f"{kind}: {self.machine.text}, {self.ranks} ranks, {self.date}, {error}"

    def as_json(self) -> str:
        """Return the text of a file, a line for each field and each kind of costs."""
        entries = {name: x for name, x in asdict(self).items() if name != "costs"}
        costs = {name: x for name, x in _json_of(self.costs).items() if name != "name"}
        return _lined({"format": FORMAT, **entries, "costs": costs}, 3)


def _lined(entry: Any, depth: int) -> str:
    """Return JSON with a line for each entry of the outermost objects, so that one can read it."""
    if not isinstance(entry, dict) or not depth:
        return json.dumps(entry)
    rows = [f"{json.dumps(key)}: {_lined(value, depth - 1)}" for key, value in entry.items()]
    return "{\n" + ",\n".join(rows) + "\n}" if rows else "{}"


def parsed(text: str) -> CostTable:
    """Return the table of a file's text.

    Raises:
        ProgramError: the text is no table of costs.
    """
    try:
        entries = from_json(text)
        if not isinstance(entries, dict) or entries.get("format") != FORMAT:
            raise ValueError(f'it does not say "format": "{FORMAT}"')
        entries = _current(entries)
        del entries["format"]
        machine = Machine(**entries.pop("machine"))
        pairs = {name: (float(a), float(b)) for name, (a, b) in entries.pop("held_out").items()}
        costs = costs_of(entries.pop("costs"))
        entries.pop("is_default", None)  # where it lies says so
        table = CostTable(costs=costs, machine=machine, held_out=pairs, **entries)
        return replace(table, costs=replace(costs, name=table.text))
    except ProgramError as error:
        raise _no_table(f"{error.what}: {error.because}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise _no_table(str(error)) from error


def _no_table(why: str) -> ProgramError:
    hint = "mdfuse calibrate writes one"
    return ProgramError("this is no table of costs", because=why, hint=hint)


def costs_of(entries: Mapping[str, Any]) -> Costs:
    """Return the costs of JSON: fields of `Costs`, with lists for points.

    Raises:
        ProgramError, TypeError, ValueError, AttributeError: it has none, or wrong ones.
    """
    given = _current(entries)
    links = given.pop("links", {}).items()
    works = given.pop("works", {}).items()
    products, attentions = (given.pop(name, {}).items() for name in ("products", "attentions"))
    return Costs(
        **given,
        links=links_of({key: _link(**link) for key, link in links}),
        works=works_of({key: _curve(points) for key, points in works}),
        products=works_of({key: _grid(**grid) for key, grid in products}),
        attentions=works_of({key: _grid(**grid) for key, grid in attentions}),
    )


def _current(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are still in use."""
    return {key: x for key, x in entries.items() if key not in _RETIRED}


def _link(
    curve: Sequence[Sequence[float]] | None = None,
    cold: Sequence[Sequence[float]] | None = None,
    **numbers: float,
) -> Link:
    curves = {name: x and _curve(x) for name, x in (("curve", curve), ("cold", cold))}
    return Link(**numbers, **curves)  # type: ignore[arg-type]


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return Curve(tuple((size, seconds) for size, seconds in points))


def _grid(axes: Sequence[Sequence[float]], times: Sequence[float]) -> Grid:
    return Grid(tuple(map(tuple, axes)), tuple(times))


def _json_of(x: Any) -> Any:
    """Return the JSON of costs or a part of them: fields with their default value are left out."""
    if isinstance(x, Curve):
        return x.points
    if isinstance(x, Mapping):
        return {str(key): _json_of(value) for key, value in x.items()}
    if isinstance(x, Costs | Link | Grid):
        values = {f.name: getattr(x, f.name) for f in fields(x)}
        return {f.name: _json_of(values[f.name]) for f in fields(x) if values[f.name] != f.default}
    return x


class Ranks(Protocol):
    """The part of a communicator that is used here."""

    @property
    def device(self) -> torch.device: ...
    @property
    def backend(self) -> str: ...
    def all_ok(self, error_text: str | None) -> tuple[str | None, ...]: ...


def cost_table(comm: Ranks, place: Path | None = None) -> CostTable | None:
    """Return the table of costs of this machine, the same on all ranks; None where there is none.

    All ranks call it. Rank 0's table counts, since all must decide alike; its file, and why other
    files do not count, are logged under `mdfuse.costs`.

    Args:
        comm: as `mdfuse.init()` returns it.
        place: the folder of calibrations; by default where `mdfuse calibrate` writes.
    """
    mine, warnings = find_table(machine_of(comm.device, comm.backend), place)
    for line in warnings:
        _LOG.warning(line)
    texts = comm.all_ok(mine.as_json() if mine is not None else None)
    if texts[0] is None:
        return None
    table = parsed(texts[0])
    is_default = json.loads(texts[0])["is_default"]
    if mine is None or mine.as_json() != texts[0]:
        _LOG.warning("rank 0 has another table of costs, which counts: %s", table.text)
    return _marked(table) if is_default else table


def _marked(table: CostTable) -> CostTable:
    """Return a table as one that ships with the package."""
    default = replace(table, is_default=True)
    return replace(default, costs=replace(table.costs, name=default.text))


# -- files -----------------------------------------------------------------------------------------


def folder() -> Path:
    """Return where calibrations of this machine are: beside compiled functions."""
    return cache_folder() / "mdfuse" / "costs"


def file_name(machine: Machine, ranks: int) -> str:
    """Return the name of the file of a machine's calibration."""
    words = (machine.device, machine.link, machine.backend, str(machine.threads), str(ranks))
    return "-".join("".join(c if c.isalnum() else "_" for c in w) for w in words) + ".json"


def find_table(
    machine: Machine, place: Path | None = None, any_threads: bool = False
) -> tuple[CostTable | None, list[str]]:
    """Return the table that counts on a machine, and the reasons why others do not.

    The calibration with the most ranks counts.

    Args:
        machine: this one.
        place: the folder of calibrations; by default that of `folder`.
        any_threads: whether one with another number of threads does, too.
    """
    reasons: list[str] = []
    fitting = []
    for name, whole in _tables(_files(place or folder()), reasons):
        table = whole.by(machine.backend)
        threads = table.machine.threads if any_threads else machine.threads
        if (why := _differs(table.machine, replace(machine, threads=threads))) is None:
            fitting.append(table)
        else:
            reasons.append(f"{name} is of another machine: {why}")
    if fitting:
        return max(fitting, key=lambda t: (t.machine.threads == machine.threads, t.ranks)), reasons
    shipped = _shipped(machine, reasons)
    return (_marked(shipped) if shipped is not None else None), reasons


def _shipped(machine: Machine, notes: list[str]) -> CostTable | None:
    """Return the table that ships for a device and its link; one of most ranks goes first.

    One GPU alone takes that of several such GPUs, which do the same work.
    """
    tables = _tables(_files(resources.files("mdfuse").joinpath(_SHIPPED)), notes)
    alike = [t.by(machine.backend) for _, t in tables if t.machine.device == machine.device]
    fitting = [t for t in alike if machine.link in (t.machine.link, "alone")]
    if not fitting:
        notes += [f"{t.text}: not of link {machine.link}" for t in alike]
    return max(fitting, key=lambda t: (t.machine.backend == machine.backend, t.ranks), default=None)


def _differs(table: Machine, machine: Machine) -> str | None:
    """Return the difference from this machine; None: there is none."""
    a, b = asdict(table), asdict(machine)
    wrong = [f"{key} {a[key]!r}, here {b[key]!r}" for key in a if a[key] != b[key]]
    return ", ".join(wrong) or None


def _files(place: Any) -> list[tuple[str, str | OSError | UnicodeDecodeError]]:
    """Return the names and texts of the tables of a folder, which may not be there."""
    rows: list[tuple[str, str | OSError | UnicodeDecodeError]] = []
    if not place.is_dir():
        return rows
    for path in sorted(place.iterdir(), key=lambda p: str(p.name)):
        if path.name.endswith(".json"):
            try:
                rows.append((path.name, path.read_text(encoding="utf-8")))
            except (OSError, UnicodeDecodeError) as error:
                rows.append((path.name, error))
    return rows


def _tables(
    files: Sequence[tuple[str, str | OSError | UnicodeDecodeError]], lines: list[str]
) -> list[tuple[str, CostTable]]:
    rows = []
    for name, text in files:
        if not isinstance(text, str):
            lines.append(f"{name} cannot be read: {text}")
            continue
        try:
            rows.append((name, _read(text)))
        except ProgramError as error:
            lines.append(f"{name} is no table of costs: {error.because}")
    return rows


@lru_cache(maxsize=16)
def _read(text: str) -> CostTable:
    """Return a table, which nobody changes; each compilation that asks for costs reads the same."""
    return parsed(text)
