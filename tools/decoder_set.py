"""Makes the set of small pictures by which decoders are tried: python -m tools.decoder_set

The pictures need Pillow (the extra dev). Their hashes are of the decoders that are installed.
"""

import base64
import io
import json
from importlib.resources import files

import numpy as np
from PIL import Image

import torusgd.data
from torusgd.data.decode import DECODER_SET, pixels_sha256
from torusgd.rng import keyed_hash

HEIGHT, WIDTH = 37, 45


def drawing() -> Image.Image:
    """Slopes, edges and noise in all three colours; sides that no block of a JPEG divides."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    slopes = np.stack([rows * 6, columns * 5, (rows + columns) * 3], axis=2)
    edges = ((rows // 7 + columns // 5) % 2 * 90)[:, :, None]
    noise = keyed_hash(0, *np.ogrid[:HEIGHT, :WIDTH, :3]) % 40
    return Image.fromarray((slopes + edges + noise.astype(np.int64)).clip(0, 255).astype(np.uint8))


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    with io.BytesIO() as file:
        picture.save(file, kind, **options)
        return file.getvalue()


def pictures() -> dict[str, bytes]:
    """Files by name, whose first word is their kind."""
    colours = drawing()
    grey, deep = colours.convert("L"), Image.fromarray(np.asarray(colours.convert("L")).astype(np.uint16) * 251)
    clear = colours.copy()
    clear.putalpha(grey)
    return {
        "JPEG 4:2:0": encoded(colours, "JPEG", quality=85, subsampling="4:2:0"),
        "JPEG 4:2:2": encoded(colours, "JPEG", quality=60, subsampling="4:2:2"),
        "JPEG 4:4:4": encoded(colours, "JPEG", quality=95, subsampling="4:4:4"),
        "JPEG grey": encoded(grey, "JPEG", quality=75),
        "JPEG progressive 4:2:0": encoded(colours, "JPEG", quality=85, subsampling="4:2:0", progressive=True),
        "JPEG progressive 4:4:4": encoded(colours, "JPEG", quality=50, subsampling="4:4:4", progressive=True),
        "JPEG restarts": encoded(colours, "JPEG", quality=70, restart_marker_blocks=2),
        "JPEG CMYK": encoded(colours.convert("CMYK"), "JPEG", quality=80),
        "PNG colours": encoded(colours, "PNG"),
        "PNG grey": encoded(grey, "PNG"),
        "PNG palette": encoded(
            colours.quantize(17, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE), "PNG"
        ),
        "PNG two levels": encoded(grey.convert("1", dither=Image.Dither.NONE), "PNG"),
        "PNG alpha": encoded(clear, "PNG"),
        "PNG 16 bits": encoded(deep, "PNG"),
    }


def main() -> None:
    found = {name: [base64.b64encode(data).decode(), pixels_sha256(data)] for name, data in pictures().items()}
    path = files(torusgd.data).joinpath(DECODER_SET)
    with open(str(path), "w") as file:
        json.dump(found, file, indent=0)
        file.write("\n")


if __name__ == "__main__":
    main()
