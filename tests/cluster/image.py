"""The nodes' image contains nothing of the project.

Interpreter, packages and sources of this machine are mounted read-only at their own paths. So a
change needs no new image, and no image needs a copy of torch. If no image can be pulled, the base
image is made of the distribution's packages. It is kept under a tag of its own, and made again only
if that tag is removed.
"""

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from commands import command, docker
from engine import NoEngine, need_package

ROOT = Path(__file__).parents[2]
BASE = "elastic-train-base"
NODE = "elastic-train-node"
PULLED = "python:3.11-slim"
# This package depends on all libraries that any Python interpreter may load, whatever the release
# names them.
INCLUDE = "python3"
KEYRINGS = Path("/usr/share/keyrings")
WASTE = ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man")


def node_image() -> str:
    """The tag of an image that can run this machine's interpreter.

    Builds it if it is missing. Raises NoEngine.
    """
    if not docker("images", "--quiet", BASE):
        _make_base()
    words = ("--force-rm", "--target", "node", "--build-arg", f"BASE={BASE}", "--tag", NODE)
    docker("build", *words, str(ROOT))
    return NODE


def mounts() -> list[Path]:
    """Folders that a node needs: virtual environment, its base interpreter, and sources."""
    base = Path(sys.base_prefix).resolve()
    # The base image has the distribution's interpreter too, and nothing may be mounted over /usr.
    ours = [] if base == Path("/usr") else [base]
    # The scripts in a virtual environment name its path at installation, which may be a symbolic
    # link.
    return list(dict.fromkeys([*ours, Path(sys.prefix).resolve(), Path(sys.prefix), ROOT]))


def interpreter() -> Path:
    return Path(sys.prefix).resolve() / "bin" / "python"


def _make_base() -> None:
    print("making a base image of the distribution's packages; about a minute, once", flush=True)
    need_package("debootstrap", "debootstrap")
    release = platform.freedesktop_os_release()
    codename = release.get("VERSION_CODENAME", "stable")
    folder = Path(tempfile.mkdtemp(prefix="elastic-base-"))
    keyring = KEYRINGS / f"{release['ID']}-archive-keyring.gpg"
    words = ["debootstrap", "--variant=minbase", f"--include={INCLUDE}"]
    words += [f"--keyring={keyring}"] if keyring.exists() else []
    try:
        command(*words, codename, str(folder), *_mirror(codename))
    except RuntimeError as error:
        raise NoEngine(
            f"expected a base system by debootstrap, found: {str(error)[-300:]}; "
            f"or make one by hand: docker pull {PULLED} && docker tag {PULLED} {BASE}"
        ) from error
    # This machine's interpreter may be mounted below /root, and nodes run as another user.
    (folder / "root").chmod(0o755)
    for waste in WASTE:
        shutil.rmtree(folder / waste, ignore_errors=True)
    archive = subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(["docker", "import", "-", BASE], stdin=archive.stdout, check=True, capture_output=True)
    if archive.wait():
        raise NoEngine("tar could not read the base system that debootstrap made")


def _mirror(codename: str) -> list[str]:
    """The URL from which this machine installs packages of its release, where apt-get knows one."""
    known = command("apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", check=False)
    return [url for line in known.splitlines() for name, url in [line.split()] if name == codename][:1]
