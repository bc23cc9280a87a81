"""Images a second of a rank's loader, beside torch's DataLoader of the same augmented images.

python benchmarks/loading.py [--workers 0 2] [--repeats 9] [--images 256] [--batch 64] [--shards 4]

Both load JPEG files of 224x224, which it makes, through torchvision's RandomResizedCrop, flip,
ColorJitter and Normalize, with one thread. DataLoader shuffles and draws from one random stream in
each process; a rank's loader draws each sample from a stream of its own, and gives each batch in
shards. Each turn loads all images once, from the start of its processes on. They take turns, so
that other load on the machine hits both, and the first of a pair changes from turn to turn. The
table shows the medians of all turns, and median and quartiles of the ratios of the pairs.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from elastic.data.loader import Loader
from elastic.data.order import SampleOrder, Tail

SIZE = 224


class Jpegs(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.jpg"))
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE),
                transforms.RandomHorizontalFlip(),
                transforms.ColorJitter(0.4, 0.4, 0.4, 0.1),
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index]) as image:
            return self.transform(image.convert("RGB")), index


def make(folder: Path, images: int) -> None:
    """Smooth colours with some noise, so that files and decoding are of the size of photographs."""
    draw = np.random.default_rng(0)
    for number in range(images):
        smooth = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((SIZE, SIZE))
        noisy = np.asarray(smooth, dtype=np.float32) + draw.normal(0, 12, (SIZE, SIZE, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=90)


def plain(args: argparse.Namespace, dataset: Jpegs, workers: int) -> Iterable[Any]:
    return DataLoader(dataset, batch_size=args.batch, shuffle=True, num_workers=workers, drop_last=True)


def keyed(args: argparse.Namespace, dataset: Jpegs, workers: int) -> Iterable[Any]:
    order = SampleOrder(
        seed=0,
        samples=len(dataset),
        global_batch=args.batch,
        shards=args.shards,
        epochs=1,
        tail=Tail.DROP,
    )
    loader = Loader(dataset=dataset, order=order, device=torch.device("cpu"), workers=workers)
    return loader.steps(range(args.shards), 1)


def seconds(made: Callable[[], Iterable[Any]]) -> float:
    began = time.perf_counter()
    for _ in made():
        pass
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--shards", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("workers", "DataLoader", "elastic-train", "ratio of times", title="images a second")
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), args.images)
        dataset = Jpegs(Path(name))
        loaded = args.images // args.batch * args.batch
        for workers in args.workers:
            ways = [lambda way=way: way(args, dataset, workers) for way in (plain, keyed)]  # noqa: B023 - called in this turn
            pairs = []
            for turn in range(args.repeats + 1):
                took = {number: seconds(ways[number]) for number in ((0, 1), (1, 0))[turn % 2]}
                pairs.append((took[0], took[1]))
            theirs, ours = zip(*pairs[1:], strict=True)  # the first pair reads the files from the disk
            low, middle, high = statistics.quantiles([b / a for a, b in pairs[1:]], n=4)
            rates = [f"{loaded / statistics.median(each):.0f}" for each in (theirs, ours)]
            table.add_row(str(workers), *rates, f"{middle:.3f} ({low:.3f} to {high:.3f})")
    Console().print(table)


if __name__ == "__main__":
    main()
