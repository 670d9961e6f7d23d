"""The folder that relative paths of the settings start from, in every process of a run.

Workers of a cluster that `ray start` made run in the folder where that was called. An engine's keeper imports this, so
it imports nothing heavy.
"""

import os

_VARIABLE = "MILES_DRIVER_FOLDER"


def driver_folder_env() -> dict[str, str]:
    """Environment of a Ray actor that tells it the driver's working folder."""
    return {_VARIABLE: os.getcwd()}


def enter_driver_folder() -> None:
    """Go to the driver's working folder, where this machine has it; a Ray actor does so first of all."""
    folder = os.environ.get(_VARIABLE)
    if folder is not None and os.path.isdir(folder):
        os.chdir(folder)
