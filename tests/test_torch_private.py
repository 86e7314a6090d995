"""What torch does not promise to keep is used in four modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mdfuse import torch_private
from mdfuse.errors import PACKAGE
from mdfuse.frontend.importing import torch_tracing
from mdfuse.ir import attention_kernels
from mdfuse.plan import inductor

#: Where private parts of torch may stand: in one module, in one each for attention, the compiler
#: and the export.
OWN = {Path(x.__file__) for x in (torch_private, attention_kernels, inductor, torch_tracing)}

MODULES = sorted(set(Path(PACKAGE).rglob("*.py")) - OWN)

#: Private names of torch's objects that code could use without importing anything.
ATTRIBUTES = {
    "_allgather_base",
    "_current_level",
    "_end_coalescing",
    "_is_zerotensor",
    "_local_tensor",
    "_reduce_scatter_base",
    "_spec",
    "_start_coalescing",
}


def private_uses(text: str) -> Iterator[str]:
    """Imports from private modules of torch or of private names, and attributes likewise."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if _is_private(name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (p for p in parts if parts[0] == "torch" and _is_private(p))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            is_torch = isinstance(root, ast.Name) and root.id in ("torch", "dist")
            if is_torch or node.attr in ATTRIBUTES:
                yield node.attr


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_module_uses_what_is_private() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in MODULES}
    assert not [(path, name) for path, text in texts.items() for name in private_uses(text)]


@pytest.mark.parametrize(
    "text",
    [
        "import torch._C",
        "from torch._C import x",
        "from torch.distributed import _functional",
        "torch.cuda._lazy_init()",
        "x = dist.distributed_c10d._world",
        "x._spec",
    ],
)
def test_such_uses_are_seen(text: str) -> None:
    assert [*private_uses(text)]


def test_what_is_used_is_there() -> None:
    """In the torch of this process, whichever it is."""
    group = torch_private.fake_group(0, 2)
    assert callable(torch_private.all_gather_of(group))
    assert callable(torch_private.reduce_scatter_of(group))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        local = dist.tensor.empty(2, 3, device_mesh=mesh, placements=[Shard(0)])
        assert isinstance(local, DTensor) and torch_private.spec_of(local).shape == (2, 3)
        assert type(torch_private.local_of(local)) is type(local.to_local())
        assert not torch_private.shard_order(local) or torch_private.shard_order(local)[0][0] == 0
    finally:
        dist.destroy_process_group()
    assert isinstance(torch_private.asynchronous_type(), type)
    assert torch_private.transform_level() is None and torch_private.forward_level() == -1
    zeros = torch.zeros(2)
    assert not torch_private.is_transformed(zeros) and not torch_private.is_zero_tensor(zeros)


def test_the_compilers_folder_is_known_without_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import takes seconds, and who looks for a table of costs need not compile anything."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for place in (None, str(tmp_path / "elsewhere")):
        if place is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", place)
        assert torch_private.cache_folder() == Path(cache_dir())
    code = (
        "import sys; from mdfuse.seeing.named_tables import table_here; table_here(); "
        "assert 'torch._inductor' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
