"""The column type of images: encoded bytes, through Pillow, and structs of Spark's image source."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.data.columns.base import Column, ColumnSpec, DataType, check_values
from sparkdl.data.fields import Field
from sparkdl.data.row_errors import RowError, columns_with, drop
from sparkdl.errors import known_arguments
from sparkdl.plain import is_number, is_whole, make_plain

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MODES = {"L": 1, "RGB": 3, "RGBA": 4}
"""Number of channels of each colour mode, by Pillow's name."""
STRUCT = ("origin", "height", "width", "nChannels", "mode", "data")
"""The fields of Spark's image schema (``pyspark.ml.image.ImageSchema``)."""
CHANNELS = {0: 1, 16: 3, 24: 4}
"""Number of channels of OpenCV's types CV_8UC1, CV_8UC3 and CV_8UC4; stored as B, G, R, A."""
_DAMAGED = "Filter out such rows, or fix the images at their source."
_INSTALL = 'Install it for the Python of the executors: pip install pillow (the extra "images").'


def _bad(text: str, remedy: str = _DAMAGED) -> RowError:
    """Return the reason why an image cannot be read, without its row."""
    return RowError("", 0, text, remedy)


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Image(ColumnSpec):
    """A specification of images: encoded bytes (PNG, JPEG, ...), or structs of Spark's image source.

    Executors decode them to (C, H, W), with channels in the order of ``mode``. Encoded bytes and
    any change of size or mode need Pillow, the extra ``images``.
    """

    kind = "image"
    grows = True
    records_hold_tensors = True

    size: tuple[int, int] | None = None
    """(height, width) to which every image is resized, bilinearly; None: all must have one size."""
    mode: str = "RGB"
    """"RGB", "L" (grey) or "RGBA"; other images are converted to it."""
    scale: float | None = 1 / 255
    """Factor for the bytes 0 to 255, which become the model's floats; None: they stay uint8.

    uint8 takes a quarter of the memory; ``augment`` or the model then gets uint8.
    """

    def __post_init__(self) -> None:
        make_plain(self)
        if isinstance(self.size, list):
            object.__setattr__(self, "size", tuple(self.size))
        size, scale = self.size, self.scale
        pair = isinstance(size, tuple) and len(size) == 2 and all(is_whole(n, 1) for n in size)
        factor = scale is None or (is_number(scale) and scale != 0)
        check_values(
            self,
            ("size: give (height, width) in pixels, or None.", size is None or pair),
            (f"mode: use one of {', '.join(MODES)}.", self.mode in MODES),
            ("scale: give a number other than 0, or None for bytes.", factor),
        )

    @classmethod
    def default(cls, data_type: DataType) -> Image | None:
        """Return the specification of a struct of Spark's image source, None for other types."""
        return cls() if _is_struct(data_type) else None

    def resolve(
        self, name: str, data_type: DataType, float_dtype: str, trained: Field | None
    ) -> Column | str:
        """Return the column, or an error text if it is neither binary nor a struct of an image."""
        if not _is_struct(data_type) and data_type.typeName() != "binary":
            return (
                f"is of type {data_type.simpleString()}, which is not an image: give encoded bytes "
                '(binary), or what spark.read.format("image") reads.'
            )
        return Column(name, float_dtype if self.scale is not None else "uint8", 3, spec=self)

    def convert(self, array: pa.Array, column: Column, first_row: int) -> np.ndarray:
        """Return images as (rows, C, H, W): ``column.dtype`` times ``scale``, or uint8.

        Raises:
            RowError: An image is null, damaged, or of another size than row 0's.
        """
        pixels: list[np.ndarray] = []
        for i, scalar in enumerate(array):
            row, name = first_row + i, column.name
            if not scalar.is_valid:
                raise RowError(name, row, "is null", drop(name))
            try:
                found = _pixels(scalar, self)
            except RowError as error:
                raise RowError(name, row, str(error), error.problem.remedy) from None
            if pixels and found.shape != pixels[0].shape:
                raise RowError(
                    name,
                    row,
                    f"is an image of {_size(found)} where row {first_row} is of {_size(pixels[0])}",
                    f"Resize them: {columns_with(name, 'Image(size=(height, width))')}.",
                )
            pixels.append(found)
        if not pixels:
            pixels.append(np.zeros((MODES[self.mode], *(self.size or (0, 0))), np.uint8))
        stacked = np.stack(pixels)[: len(array)]
        if self.scale is None:
            return stacked
        return np.multiply(stacked, np.dtype(column.dtype).type(self.scale), dtype=column.dtype)


def _is_struct(data_type: DataType) -> bool:
    """Return whether this is the struct of Spark's image source."""
    return getattr(data_type, "names", None) == list(STRUCT)


def _pixels(scalar: Any, image: Image) -> np.ndarray:
    """Return one image as uint8 (C, H, W)."""
    if isinstance(scalar, pa.StructScalar):
        raw = _from_struct(scalar.as_py())
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
    height, width, kind, data = (value[name] for name in ("height", "width", "mode", "data"))
    if data is None or None in (height, width, kind) or kind == -1 or height < 1 or width < 1:
        origin = f" ({value['origin']})" if value["origin"] else ""
        raise _bad(
            f"is an image that Spark could not read{origin}",
            'Leave such rows out: spark.read.format("image").option("dropInvalid", True).',
        )
    channels = CHANNELS.get(kind)
    if channels is None:
        raise _bad(
            f"is an image of OpenCV's type {kind}, which is not one of "
            f"{', '.join(map(str, CHANNELS))} (8 bits, 1, 3 or 4 channels)"
        )
    if len(data) != height * width * channels:
        raise _bad(
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
        raise _bad(
            f"is not an image that can be read ({len(data):,} bytes; {type(error).__name__}: "
            f"{text})"
        ) from None
    if cut or picture.mode.startswith(("I", "F")):
        raise _bad(
            f'is an image of more than 8 bits a channel (Pillow\'s mode "{picture.mode}")',
            "Convert such images to 8 bits, or read them with sparkdl.Convert(function).",
        )
    return picture


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise _bad("is an image that needs Pillow to be read", _INSTALL) from None
    return PIL.Image


def _size(pixels: np.ndarray) -> str:
    return f"{pixels.shape[1]} x {pixels.shape[2]}"
