"""Fashion-MNIST as arrays: read from Debian's package, from a folder, or downloaded by torchvision."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DOWNLOAD_FOLDER = Path(__file__).resolve().parent.parent / "build" / "data"
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


class DatasetError(Exception):
    """The data set is missing or damaged; the message says what to do."""


def locate(folder: Path | None = None) -> Path:
    """The folder that holds the data set; downloads it with torchvision where it is nowhere else.

    Call it in one process before the others. Errors: DatasetError, one sentence that names the remedy.
    """
    if folder is not None:
        if missing := _missing(folder):
            raise DatasetError(
                f"{folder} lacks of Fashion-MNIST {', '.join(f'{name}.gz' for name in missing)}; Debian's package "
                "dataset-fashion-mnist has them."
            )
        return folder
    downloaded = DOWNLOAD_FOLDER / "FashionMNIST" / "raw"
    for candidate in (DEBIAN_FOLDER, downloaded):
        if not _missing(candidate):
            return candidate
    try:
        from torchvision.datasets import FashionMNIST
    except ImportError:
        raise DatasetError(
            f"Fashion-MNIST is not in {DEBIAN_FOLDER}: install Debian's package dataset-fashion-mnist, or torchvision, "
            "which downloads it, or name a folder that holds its four files with --data."
        ) from None
    try:
        FashionMNIST(str(DOWNLOAD_FOLDER), download=True)
    except Exception as error:
        raise DatasetError(
            f"torchvision could not download Fashion-MNIST ({error}): install Debian's package dataset-fashion-mnist, "
            "or name a folder that holds its four files with --data."
        ) from error
    return downloaded


def load(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads "train" (60 000 images) or "test" (10 000): pixels [n, 28, 28] u8 and labels [n] u8.

    Errors: DatasetError for a missing or damaged file.
    """
    pixels, labels = (_read(folder, name) for name in _FILES[part])
    if pixels.shape != (len(labels), 28, 28):
        raise DatasetError(f"The {part} images and labels in {folder} do not belong together.")
    return pixels, labels


def _path(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def _missing(folder: Path) -> list[str]:
    return [name for names in _FILES.values() for name in names if _path(folder, name) is None]


def _read(folder: Path, name: str) -> np.ndarray:
    """An IDX file: 0, 0, 8 (= u8), the number of dimensions, each dimension as a big-endian u32, then the elements."""
    path = _path(folder, name)
    if path is None:
        raise DatasetError(f"{folder} lacks {name}.gz.")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be read: {error}.") from error
    dimensions = content[3] if len(content) > 3 and content[:3] == b"\0\0\x08" else 0
    begin = 4 + 4 * dimensions
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, begin, 4)]
    if dimensions == 0 or len(content) != begin + math.prod(shape):
        raise DatasetError(f"{path} is not a whole IDX file of bytes.")
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)
