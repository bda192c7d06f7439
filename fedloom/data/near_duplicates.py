"""Near-duplicates among images: copies that were resized, compressed again or turned upright.

Each image is reduced to a thumbnail of 9 × 9 grey values. Its difference hash has a bit for each pair of neighbours:
whether the right one is brighter (64 bits) and whether the lower one is (64 bits). Two images are near-duplicates if
their hashes differ in at most `BITS` bits and the thumbnails in at most `LEVELS` grey levels on average, apart from
brightness: the second condition tells apart simple drawings whose hashes are alike.
"""

import numpy as np

SIDE = 9
"""Height and width of a thumbnail."""
BITS = 4
"""Maximum number of different bits of 128."""
LEVELS = 3.0
"""Maximum mean difference of two thumbnails in grey levels of 255, after their means are subtracted."""
FLAT = 4
"""Thumbnails whose grey levels span less than this are not compared: they have no structure."""
WINDOW = 64
"""Maximum number of neighbours, in sorted order, that each image is compared with; bounds the time."""


def hashes(thumbnails: np.ndarray) -> np.ndarray:
    """Return the difference hash of thumbnails.

    Args:
        thumbnails: uint8 [N, 9, 9].

    Returns:
        bool [N, 128].
    """
    right = thumbnails[:, :8, 1:] > thumbnails[:, :8, :-1]
    down = thumbnails[:, 1:, :8] > thumbnails[:, :-1, :8]
    return np.concatenate([right.reshape(-1, 64), down.reshape(-1, 64)], axis=1)


def near_duplicates(thumbnails: np.ndarray) -> list[np.ndarray]:
    """Return the groups of near-duplicates.

    Hashes that differ in at most 4 bits agree in at least one of 5 bands of bits. So for each band, images are sorted
    by it and compared with their neighbours in that order. Images without structure are not compared.

    Args:
        thumbnails: uint8 [N, 9, 9].

    Returns:
        Positions of each group's images, int64, ascending; groups have at least two images.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    flat = thumbnails.reshape(len(thumbnails), SIDE * SIDE)
    compared = np.flatnonzero(np.ptp(flat, axis=1) >= FLAT) if len(flat) else np.empty(0, np.int64)
    if len(compared) < 2:
        return []
    # Equal thumbnails are compared once, since a thousand copies would fill every window.
    distinct, copy_of = np.unique(flat[compared], axis=0, return_inverse=True)
    pairs = _similar_pairs(distinct)
    graph = coo_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), shape=(len(distinct), len(distinct)))
    group = connected_components(graph, directed=False)[1][copy_of.reshape(-1)]
    order = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    parts = np.split(compared[order], np.cumsum(sizes)[:-1])
    return [part for part in parts if len(part) > 1]


def _similar_pairs(thumbnails: np.ndarray) -> np.ndarray:
    """Return pairs of positions of similar thumbnails [N, 81], int64 [P, 2]."""
    bits = hashes(thumbnails.reshape(-1, SIDE, SIDE))
    found = [np.empty((0, 2), np.int64)]
    for band in np.array_split(np.arange(bits.shape[1]), BITS + 1):
        rest = np.setdiff1d(np.arange(bits.shape[1]), band)
        packed = np.packbits(np.concatenate([bits[:, band], bits[:, rest]], axis=1), axis=1)
        order = np.argsort(np.ascontiguousarray(packed).view(f"S{packed.shape[1]}").reshape(-1), kind="stable")
        keys = np.packbits(bits[:, band], axis=1)[order]
        for shift in range(1, min(WINDOW, len(order) - 1) + 1):
            here = np.flatnonzero((keys[shift:] == keys[:-shift]).all(1))
            if not len(here):
                break
            one, other = order[here], order[here + shift]
            near = (bits[one] != bits[other]).sum(1) <= BITS
            one, other = one[near], other[near]
            near = _difference(thumbnails[one], thumbnails[other]) <= LEVELS
            found.append(np.stack([one[near], other[near]], axis=1))
    return np.concatenate(found)


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float32), b.astype(np.float32)
    return np.abs((a - a.mean(1, keepdims=True)) - (b - b.mean(1, keepdims=True))).mean(1)
