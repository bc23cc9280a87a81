"""A file of torch.save that holds tensors alone, which torch.load reads with weights_only."""

from collections.abc import Mapping
from typing import BinaryIO

import torch

from elastic.snapshot import image as images
from elastic.train.state.document import with_layer_versions


def write(
    file: BinaryIO, image: memoryview, names: Mapping[str, str], layers: dict[str, dict[str, object]]
) -> None:
    """names: of the tensors in the image, by their names in the file. layers: the versions of a
    module's layers, without which some layers refuse a state.

    Tensors that shared their memory share it in the file. Raises OSError.
    """
    tensors, _ = images.read(image, copy=False)
    # A view would be written with all of the image; each in memory of its own, tied ones in one.
    copies = {id(tensors[tensor]): tensors[tensor].clone() for tensor in names.values()}
    found = {name: copies[id(tensors[tensor])] for name, tensor in names.items()}
    try:
        torch.save(with_layer_versions(found, layers) if layers else found, file)
    except RuntimeError as error:  # what torch makes of a write that failed
        raise OSError(f"torch.save: {error}") from error
