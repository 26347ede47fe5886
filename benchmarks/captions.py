"""Two corpora of pictures with captions, as TSVs and PNGs: Fashion-MNIST's pictures in grids, described by a small
grammar, and emoji with their names in many languages.

    python -m benchmarks.captions grids FASHION_MNIST OUT [--images 40000]
    python -m benchmarks.captions emoji emoji-datasource-twitter-*.tgz emojibase-data-*.tgz OUT

Grids: FASHION_MNIST is a folder of its four idx files (Debian: dataset-fashion-mnist). A grid of 3 x 3 cells has two or
three groups of one to three pictures: "a bag above two shoes", "three shirts left of a bag left of a shoe". A fifth of
the descriptions occurs in test.tsv only; valid.tsv has the others, of pictures that are not trained on either. Dresses
are left out, and classes that are often confused have one name, so that errors are those of the description.

Emoji: the files that `npm pack emoji-datasource-twitter emojibase-data` writes. One caption in each locale; an emoji is
in one of train.tsv, valid.tsv and test.tsv with all of its captions. Flags, whose names cannot be inferred, and skin
tones are left out.

On two CPU cores, and on a GPU:

    attent train --task caption --data GRIDS --out grids --minutes 10 --set model.frontend.patch_size=14
    attent train --task caption --data GRIDS --out grids
    attent score grids --data GRIDS/test.tsv -m exact cider
    attent train --task caption --data EMOJI --out emoji --rdrop 5 --metric chrf
    attent score emoji --data EMOJI/test.tsv --tgt de -m exact chrf
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from pathlib import Path

import numpy as np
from PIL import Image

from attent.data import images
from attent.data.arrays import Array

NOUNS = {  # by the labels of Fashion-MNIST
    "shirt": (0, 2, 4, 6),  # T-shirt, pullover, coat, shirt
    "pair of trousers": (1,),
    "shoe": (5, 7, 9),  # sandal, sneaker, ankle boot
    "bag": (8,),
}
NUMBERS = ("a", "two", "three")
RELATIONS = ("above", "left of")
CELLS, SIDE = 3, 28  # of a grid, pixels of a picture
TEST_SHARE = 0.2  # of the descriptions
EVAL_IMAGES = 2_000
VARIATION_SELECTOR = "FE0F"

Scene = tuple[str, tuple[tuple[int, str], ...]]  # a relation, and the number and the noun of each group


# ---- grids -----------------------------------------------------------------------------------------------------------


def list_scenes() -> list[Scene]:
    """Return all descriptions of two or three groups of different things."""
    counts = range(1, CELLS + 1)
    return [
        (relation, tuple(zip(numbers, nouns, strict=True)))
        for relation, size in product(RELATIONS, (2, 3))
        for numbers, nouns in product(product(counts, repeat=size), permutations(NOUNS, size))
    ]


def describe_scene(scene: Scene) -> str:
    relation, groups = scene
    return f" {relation} ".join(count_noun(*group) for group in groups)


def count_noun(count: int, noun: str) -> str:
    plural = noun.replace("pair ", "pairs ") if " " in noun else f"{noun}s"
    return f"{NUMBERS[count - 1]} {noun if count == 1 else plural}"


def draw_scene(scene: Scene, pictures: Array, labels: Array, rng: np.random.Generator) -> Array:
    """Draw a grid: each group is in one row (or column), the first above (or left of) the second."""
    relation, groups = scene
    grid = np.zeros((CELLS * SIDE, CELLS * SIDE), np.uint8)
    lines = np.sort(rng.choice(CELLS, len(groups), replace=False))
    column = int(rng.integers(CELLS))  # of single pictures, or their places would fit both relations
    is_single = all(count == 1 for count, _ in groups)
    for line, (count, noun) in zip(lines.tolist(), groups, strict=True):
        places = [column] if is_single else rng.choice(CELLS, count, replace=False).tolist()
        for place in places:
            picture = pictures[rng.choice(np.flatnonzero(np.isin(labels, NOUNS[noun])))]
            row, col = (line, place) if relation == "above" else (place, line)
            grid[row * SIDE : (row + 1) * SIDE, col * SIDE : (col + 1) * SIDE] = picture
    return grid


def read_pictures(split: images.ImageSplit) -> tuple[Array, Array]:
    assert isinstance(split, images.IdxSplit)
    return images.read_idx(split.images, 3), images.read_idx(split.labels, 1)


def write_grids(source: Path, out: Path, count: int, seed: int = 1) -> None:
    splits = images.find_splits(source)
    rng = np.random.default_rng(seed)
    scenes = list_scenes()
    order = rng.permutation(len(scenes))
    num_test = round(TEST_SHARE * len(scenes))
    unseen, seen = [scenes[i] for i in order[:num_test]], [scenes[i] for i in order[num_test:]]
    parts = (("train", seen, count), ("valid", seen, EVAL_IMAGES), ("test", unseen, EVAL_IMAGES))
    for split, known, number in parts:
        pictures, labels = read_pictures(splits["train" if split == "train" else "test"])
        rows = []
        (out / split).mkdir(parents=True, exist_ok=True)
        for i in range(min(number, count)):
            scene = known[int(rng.integers(len(known)))]
            Image.fromarray(draw_scene(scene, pictures, labels, rng)).save(out / split / f"{i}.png")
            rows.append((f"{split}/{i}.png", describe_scene(scene)))
        write_table(out / f"{split}.tsv", ("image", "text"), rows)


# ---- emoji -----------------------------------------------------------------------------------------------------------


def write_emoji(pictures: Path, names: Path, out: Path, seed: int = 1) -> None:
    captions = read_names(names)
    with tarfile.open(pictures) as archive:
        emoji = json.loads(read_member(archive, "package/emoji.json"))
        emoji = [e for e in emoji if e.get("has_img_twitter", True) and e.get("category") != "Flags"]
        emoji = [e for e in emoji if normalize_code(e["unified"]) in captions]
        (out / "images").mkdir(parents=True, exist_ok=True)
        for e in emoji:
            content = read_member(archive, f"package/img/twitter/64/{e['image']}")
            (out / "images" / e["image"]).write_bytes(content)
    order = np.random.default_rng(seed).permutation(len(emoji))
    num_eval = max(1, len(emoji) // 10)
    parts = {"test": order[:num_eval], "valid": order[num_eval : 2 * num_eval], "train": order[2 * num_eval :]}
    for split, indices in parts.items():
        rows = [
            (f"images/{emoji[i]['image']}", text, language)
            for i in sorted(indices.tolist())
            for language, text in captions[normalize_code(emoji[i]["unified"])]
        ]
        write_table(out / f"{split}.tsv", ("image", "text", "language"), rows)


def read_names(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Return (locale, name) pairs of each emoji by its code."""
    captions: dict[str, list[tuple[str, str]]] = {}
    with tarfile.open(path) as archive:
        members = sorted(name for name in archive.getnames() if name.count("/") == 2 and name.endswith("/data.json"))
        for member in members:
            for emoji in json.loads(read_member(archive, member)):
                if emoji.get("label"):
                    entry = (member.split("/")[1], " ".join(emoji["label"].split()))
                    captions.setdefault(normalize_code(emoji["hexcode"]), []).append(entry)
    return captions


def normalize_code(code: str) -> str:
    return "-".join(part for part in code.upper().split("-") if part != VARIATION_SELECTOR)


def read_member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert isinstance(file, io.BufferedReader), name
    return file.read()


# ---- files -----------------------------------------------------------------------------------------------------------


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    path.write_text("".join(f"{line}\n" for line in format_rows(header, rows)), encoding="utf-8")


def format_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "\t".join(header)
    yield from ("\t".join(row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="corpus", required=True)
    grids, emoji = commands.add_parser("grids"), commands.add_parser("emoji")
    grids.add_argument("source", type=Path)
    grids.add_argument("--images", type=int, default=40_000)
    emoji.add_argument("pictures", type=Path)
    emoji.add_argument("names", type=Path)
    for command in (grids, emoji):
        command.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.corpus == "grids":
        write_grids(args.source, args.out, args.images)
    else:
        write_emoji(args.pictures, args.names, args.out)


if __name__ == "__main__":
    main()
