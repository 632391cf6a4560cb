"""Check the files of a job's inputs before the job reads them.

The jobs of a build read the same models and tokens again and again. A file of which the size, the
times and the inode are those of an earlier check is not read again (snakechat.workflow.digests);
`scripts/verify.py` reads every file.

Standard library only: scripts/launch.py imports this module before the program imports torch.
"""

from collections.abc import Mapping
from pathlib import Path

from snakechat.workflow.digests import DigestCache
from snakechat.workflow.manifest import Manifest, check_files

# Beside what planning remembers. It can be deleted at any time.
DIGESTS = Path(".snakemake/snakechat/inputs.json")


def check_inputs(folders: Mapping[str, Path], manifests: Mapping[str, Manifest]) -> None:
    """Check the files of the inputs of a job.

    Args:
        folders: Result folders by the names of the inputs.
        manifests: Their manifests by the same names.

    Raises:
        InputError: A file is not the one in the manifest.
    """
    cache = DigestCache(DIGESTS)
    for name, manifest in manifests.items():
        check_files(folders[name], manifest, cache)
    # A process of several ends without the functions that would save it.
    cache.save()
