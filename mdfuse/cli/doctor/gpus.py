"""Find the GPUs that torch sees, and how they are linked (NVIDIA's management library)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from rich.table import Table

from mdfuse.cli.doctor.findings import Finding
from mdfuse.cli.rich_tables import size_text, titled

#: nvmlGpuTopologyLevel_t: how far up two GPUs have a PCIe ancestor in common.
PCIE_LEVELS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "between processors",
}


def findings() -> list[Finding]:
    """Return one finding per GPU that torch sees."""
    if not torch.cuda.is_available():
        return [Finding(name="GPUs", what="none that torch sees")]
    return [_gpu(i) for i in range(torch.cuda.device_count())]


def _gpu(i: int) -> Finding:
    properties = torch.cuda.get_device_properties(i)
    return Finding(name=f"GPU {i}", what=f"{properties.name}, {size_text(properties.total_memory)}")


def links() -> tuple[list[Finding], Table | None]:
    """Find how the GPUs of this host reach each other.

    Returns:
        findings, and a table of links where there are at least two GPUs, else None.
    """
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return [_unknown("nvidia-ml-py is not installed", "pip install mdfuse[cli]")], None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [_unknown(f"no NVIDIA driver ({error})", None)], None
    try:
        return _links(nvml)
    except nvml.NVMLError as error:
        return [_unknown(f"the driver does not tell ({error})", None)], None
    finally:
        nvml.nvmlShutdown()


def _links(nvml: Any) -> tuple[list[Finding], Table | None]:
    driver = nvml.nvmlSystemGetDriverVersion()
    gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    checks = [Finding(name="driver", what=f"{driver}, {len(gpus)} GPUs"), *_unseen(len(gpus))]
    if len(gpus) < 2:
        return [*checks, Finding(name="links", what="fewer than two GPUs")], None
    rows = [[_link(nvml, a, b) for b in gpus] for a in gpus]
    return checks, _matrix(rows)


def _unseen(count: int) -> list[Finding]:
    """Return a finding where the driver has GPUs and torch sees none."""
    if not count or torch.cuda.is_available():
        return []
    what = f"the driver has {count}, torch {torch.__version__} sees none"
    remedy = "install a CUDA build of torch that fits the driver; see CUDA_VISIBLE_DEVICES"
    return [Finding(name="GPUs", what=what, remedy=remedy)]


def _link(nvml: Any, a: Any, b: Any) -> str:
    if a is b:
        return ""
    try:
        status = nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == nvml.NVML_P2P_STATUS_OK:
            return f"NVLink x{_active_links(nvml, a)}"
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(a, b)
    except nvml.NVMLError as error:
        return f"unknown ({error})"
    return PCIE_LEVELS.get(level, f"PCIe level {level}")


def _active_links(nvml: Any, gpu: Any) -> int:
    """Count the NVLink links of a GPU that are up, to other GPUs or to switches."""
    count = 0
    for i in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            count += nvml.nvmlDeviceGetNvLinkState(gpu, i) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:  # older GPUs have fewer links than the library counts
            continue
    return count


def _matrix(rows: list[list[str]]) -> Table:
    table = titled("links between GPUs", "", *(f"GPU {i}" for i in range(len(rows))))
    for i, row in enumerate(rows):
        table.add_row(f"GPU {i}", *row)
    return table


def _unknown(why: str, remedy: str | None) -> Finding:
    return Finding(name="links", what=f"unknown: {why}", remedy=remedy)
