"""Which format a path is in, by what is there, never by guessing what bare ids are."""

from __future__ import annotations

from pathlib import Path

from dataloader.errors import DataError
from dataloader.formats import bare, datatrove, llm_c, megatron
from dataloader.formats.token_file import DTYPES, TokenFile


def open_tokens(path: Path, dtype: str | None = None) -> TokenFile:
    """One token file. `dtype` is of bare ids only; for any other format it must be what the file says itself.

    Raises DataError, naming the file.
    """
    found = _opened(path, dtype)
    if dtype is not None and found.dtype != DTYPES.get(dtype):
        said = next(name for name, known in DTYPES.items() if known == found.dtype)
        raise DataError(f"{path}: {found.format} ids of type {said}, not {dtype} as was said; leave the type out")
    return found


def _opened(path: Path, dtype: str | None) -> TokenFile:
    binary, index = megatron.paths_of(path)
    if megatron.is_index(index) and path in (binary, index, binary.with_suffix("")):
        return megatron.open_megatron(path)
    if datatrove.index_of(path).is_file() or path.suffix == ".ds":
        return datatrove.open_datatrove(path)
    if llm_c.is_llm_c(path):
        return llm_c.open_llm_c(path)
    if bare.is_numpy(path):
        return bare.open_numpy(path)
    if dtype is None:
        raise DataError(
            f"{path}: none of the formats that say what they are (Megatron, llm.c, .npy, datatrove), so bare ids; "
            f"say their type: {', '.join(DTYPES)}"
        )
    return bare.open_bare(path, dtype)
