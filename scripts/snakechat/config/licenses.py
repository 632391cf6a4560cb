"""The licences of datasets and models that the config declares."""

from functools import cache

from snakechat.config.recipes import Config
from snakechat.data.cards import normalized_license


@cache
def declared_licenses(config: Config) -> dict[str, str]:
    """Return the licences that the config declares, by the path of the import or the fetch.

    They are no settings of these jobs: a licence changes no bytes of data.
    """
    declared = {
        f"output/{folder}/{name}": normalized_license(entry.get("license"))
        for section, folder in (("datasets", "data"), ("models", "models"))
        for name, entry in config.values[section].items()
    }
    return {path: license for path, license in declared.items() if license}
