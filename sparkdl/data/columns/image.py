"""Images to arrays: encoded bytes through Pillow, and the struct of Spark's ``image`` source."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import MODES, Image
from sparkdl.data.row_errors import RowError, drop

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

STRUCT = ("origin", "height", "width", "nChannels", "mode", "data")
"""The fields of Spark's image schema (``pyspark.ml.image.ImageSchema``)."""
CHANNELS = {0: 1, 16: 3, 24: 4}
"""Number of channels of OpenCV's types CV_8UC1, CV_8UC3 and CV_8UC4; stored as B, G, R, A."""
_DAMAGED = "Filter such rows, or mend the images where they are made."
_INSTALL = 'Install it for the Python of the executors: pip install pillow (the extra "images").'


class _BadImage(Exception):
    """The reason why an image cannot be read, with a remedy."""

    def __init__(self, text: str, remedy: str = _DAMAGED) -> None:
        super().__init__(text)
        self.remedy = remedy


def decode_images(
    array: pa.Array, name: str, image: Image, float_dtype: str, first_row: int = 0
) -> np.ndarray:
    """Return a column of images as (rows, C, H, W): ``float_dtype`` times ``image.scale``, or uint8.

    Args:
        array: The column.
        name: Its name, for messages.
        image: The specification.
        float_dtype: The dtype of the result if the specification has a scale.
        first_row: The number of the array's row 0 in its partition, for messages.

    Raises:
        RowError: An image is null, damaged, or of another size than row 0's.
    """
    pixels: list[np.ndarray] = []
    for i, scalar in enumerate(array):
        row = first_row + i
        if not scalar.is_valid:
            raise RowError(name, row, "is null", drop(name))
        try:
            found = _pixels(scalar, image)
        except _BadImage as error:
            raise RowError(name, row, str(error), error.remedy) from None
        if pixels and found.shape != pixels[0].shape:
            raise RowError(
                name,
                row,
                f"is an image of {_size(found)} where row {first_row} is of {_size(pixels[0])}",
                f'Have them resized: columns={{"{name}": sparkdl.Image(size=(height, width))}}.',
            )
        pixels.append(found)
    if not pixels:
        pixels.append(np.zeros((MODES[image.mode], *(image.size or (0, 0))), np.uint8))
    stacked = np.stack(pixels)[: len(array)]
    if image.scale is None:
        return stacked
    return np.multiply(stacked, np.dtype(float_dtype).type(image.scale), dtype=float_dtype)


def _pixels(scalar: Any, image: Image) -> np.ndarray:
    """Return one image as uint8 (C, H, W)."""
    if isinstance(scalar, pa.StructScalar):
        raw = _from_struct({name: scalar[name] for name in STRUCT})
        if raw.shape[2] == MODES[image.mode] and image.size in (None, raw.shape[:2]):
            return np.ascontiguousarray(raw.transpose(2, 0, 1))
        picture = _pillow().fromarray(raw[:, :, 0] if raw.shape[2] == 1 else raw)
    else:
        picture = _decode(scalar.as_py())
    picture = picture if picture.mode == image.mode else picture.convert(image.mode)
    if image.size is not None and picture.size != image.size[::-1]:
        picture = picture.resize(image.size[::-1], _pillow().Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[np.newaxis] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _from_struct(value: Mapping[str, Any]) -> np.ndarray:
    """Return a row of the image schema as uint8 (H, W, C), with channels in the order R, G, B, A."""
    height, width, kind = (value[name].as_py() for name in ("height", "width", "mode"))
    data = value["data"].as_py()
    if data is None or None in (height, width, kind) or kind == -1 or height < 1 or width < 1:
        raise _BadImage(
            "is an image that Spark could not read",
            'Leave such rows out: spark.read.format("image").option("dropInvalid", True).',
        )
    channels = CHANNELS.get(kind)
    if channels is None:
        raise _BadImage(
            f"is an image of OpenCV's type {kind}, which is none of "
            f"{', '.join(map(str, CHANNELS))} (8 bits, 1, 3 or 4 channels)"
        )
    if len(data) != height * width * channels:
        raise _BadImage(
            f"is an image of {height} x {width} x {channels} pixels with {len(data)} bytes of data"
        )
    raw = np.frombuffer(data, np.uint8).reshape(height, width, channels)
    order = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[channels]
    return raw[:, :, order] if channels > 1 else raw


def _decode(data: bytes) -> Picture:
    pillow = _pillow()
    try:
        picture = pillow.open(io.BytesIO(data))
        cut = any(";16" in str(tile[-1]) for tile in picture.tile)  # Pillow cuts these to 8 bits
        picture.load()
    except Exception as error:  # plugins of Pillow raise any exception
        text = "cannot be identified" if "cannot identify" in str(error) else str(error)
        raise _BadImage(
            f"is no image that can be read ({len(data):,} bytes; {type(error).__name__}: {text})"
        ) from None
    if cut or picture.mode.startswith(("I", "F")):
        raise _BadImage(
            f'is an image of more than 8 bits a channel (Pillow\'s mode "{picture.mode}")',
            "Convert such images to 8 bits, or read them with sparkdl.Convert(function).",
        )
    return picture


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise _BadImage("is an image that needs Pillow to be read", _INSTALL) from None
    return PIL.Image


def _size(pixels: np.ndarray) -> str:
    return f"{pixels.shape[1]} x {pixels.shape[2]}"
