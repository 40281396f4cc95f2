"""Datasets to learn from without an environment: Minari's layout on disk, verified by a manifest of SHA-256 digests.

    dataset                 find, list, open and write datasets
    episodes                arrays in memory, and the check of their values
    storage                 episodes in HDF5
    spaces                  supported spaces and their JSON
    manifest                ids, digests, verification
    scores                  reference scores and normalised scores
    import_data, download   data of others
    incomplete_downloads    downloads that were interrupted
    disk_space              limit, check before writing, what to remove

Free of torch, so that the run service can list and check datasets. h5py is imported when data is read or written.
"""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.experience.datasets.dataset import (
        Dataset,
        DatasetFacts,
        DatasetSummary,
        create_dataset,
        delete_dataset,
        find_dataset,
        list_datasets,
    )
    from palaestra.experience.datasets.episodes import Episode, TransitionArrays

__all__ = [
    "Dataset",
    "DatasetFacts",
    "DatasetSummary",
    "Episode",
    "TransitionArrays",
    "create_dataset",
    "delete_dataset",
    "find_dataset",
    "list_datasets",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Dataset": "dataset",
        "DatasetFacts": "dataset",
        "DatasetSummary": "dataset",
        "Episode": "episodes",
        "TransitionArrays": "episodes",
        "create_dataset": "dataset",
        "delete_dataset": "dataset",
        "find_dataset": "dataset",
        "list_datasets": "dataset",
    },
)
