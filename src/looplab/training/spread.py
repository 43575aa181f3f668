"""Tensors that are spread over processes (DTensor): whole, in pieces, and in files.

Optimizer state goes through torch.distributed.checkpoint in its safetensors storage: every rank writes its own pieces,
and any number of processes, one too, reads them again. Nothing is pickled: what the files do not say about a tensor,
the model that it belongs to does.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from looplab.models.folder import unique_tensors


def in_pieces(tensor: Any) -> bool:
    """Whether every process has a piece of it only."""
    # Who spreads tensors has imported their type, which takes most of a second; nobody else needs it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_spread(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any of them is in pieces."""
    return any(in_pieces(tensor) for tensor in tensors.values())


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, in pieces or not; of tied ones the first name only."""
    tensors = model.state_dict()
    if not is_spread(tensors):
        return unique_tensors(model)
    first = {name for named in (model.named_parameters(), model.named_buffers()) for name, _ in named}
    return {name: tensor for name, tensor in tensors.items() if name in first}


def norm(tensors: Sequence[Tensor]) -> float:
    """The norm over all entries of all tensors: of all in pieces, or none. All ranks call this."""
    own = torch.nn.utils.get_total_norm([own_piece(tensor) for tensor in tensors])
    spread: Any = next(filter(in_pieces, tensors), None)
    if spread is None:
        return float(own)
    square = own.double().square()
    dist.all_reduce(square, group=spread.device_mesh.get_group())
    return float(square.sqrt())


def own_piece(tensor: Any) -> Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if in_pieces(tensor) else tensor


def whole(tensors: Mapping[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """The tensors put together, one after another, on the CPU where they were in pieces. All ranks call this.

    Args:
        keep: False on a rank that only helps; it gets nothing.
    """
    found = {}
    for name, tensor in tensors.items():
        full = tensor.detach().full_tensor().cpu() if in_pieces(tensor) else tensor  # type: ignore[attr-defined]
        if keep:
            found[name] = full
    return found


def as_placed(tensor: Tensor, like: Any) -> Tensor:
    """A tensor, whole on every rank or already in pieces, on the device of another and spread as that is."""
    moved = tensor.to(like.device)
    if not in_pieces(like) or in_pieces(tensor):
        return moved
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def in_turns(tensors: Iterable[Any], act: Callable[[int, Tensor], Tensor]) -> Iterator[Tensor]:
    """`act(number, tensor)` of each tensor, which sees all of it; the results are spread as the tensors are.

    Of tensors in pieces every rank computes one in as many as there are ranks. All ranks call this.
    """
    numbered = enumerate(tensors)
    for number, tensor in numbered:
        if not in_pieces(tensor):
            yield act(number, tensor)
            continue
        from torch.distributed.tensor import distribute_tensor

        mesh = tensor.device_mesh
        own, some = mesh.get_local_rank(), [(number, tensor), *itertools.islice(numbered, mesh.size() - 1)]
        mine = None
        for turn, (index, piece) in enumerate(some):  # all gathers come first, so that the ranks work at the same time
            full = piece.full_tensor()
            mine = (index, full) if turn == own else mine
        made = None if mine is None else act(*mine).contiguous()
        for turn, (_, piece) in enumerate(some):
            source: Any = made if turn == own else torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
            yield distribute_tensor(source, mesh, piece.placements, src_data_rank=turn)


def save_pieces(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Every rank writes its pieces into the folder, which exists. All ranks call this."""
    import torch.distributed.checkpoint as dcp

    ordered = {name: tensors[name] for name in sorted(tensors)}
    dcp.save(ordered, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read_pieces(folder: Path, place: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder.

    Args:
        place: Name -> a tensor; what has its shape is wanted on its device and in its pieces, all else whole.
    """
    import torch.distributed.checkpoint as dcp

    found = {}
    metadata: Any = dcp.HuggingFaceStorageReader(str(folder)).read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        like, dtype = place(name), entry.properties.dtype
        if tuple(entry.size) == tuple(like.shape):
            found[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            found[name] = torch.empty(entry.size, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what no_dist asks for
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return found
