# Pods of Kubernetes share a volume, whose files all of them see where they are (profiles/kubernetes).

from snakemake.settings.types import SharedFSUsage, StorageSettings


class OnVolume(StorageSettings):
    """What Snakemake is told of storage where pods share a volume."""

    # Pods start in a folder of their own, and are therefore told this one.
    assume_common_workdir = False


# The plugin for Kubernetes says of itself that pods share nothing, and has the files of each job
# copied from a storage and to it, which it asks for (default-storage-provider). These stay where they
# are; of their own pods have the installed software.
if workflow.storage_settings.default_storage_provider == "fs":
    own = {SharedFSUsage.SOFTWARE_DEPLOYMENT, SharedFSUsage.SOURCE_CACHE}
    shared = {"default_storage_provider": None, "shared_fs_usage": SharedFSUsage.all() - own}
    workflow.storage_settings = OnVolume(**{**vars(workflow.storage_settings), **shared})
    workflow.overwrite_workdir = os.getcwd()
