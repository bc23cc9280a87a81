"""`elastic-train` for tests, which fork their agents from one fork server instead of importing
torch for each.
"""

import os

import elastic.agent.launch  # noqa: F401 - what the command would import
from elastic import cli

if __name__ == "__main__":
    os.chdir(os.environ["DRILL_FOLDER"])
    cli.command()
