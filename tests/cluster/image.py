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
from urllib.parse import urlsplit

from engine import NoEngine, docker, need_package

ROOT = Path(__file__).parents[2]
BASE = "elastic-train-base"
NODE = "elastic-train-node"
PULLED = "python:3.11-slim"
# This package depends on all libraries that any Python interpreter may load, whatever the release
# names them.
INCLUDE = "python3"
KEYRINGS = Path("/usr/share/keyrings")


def node_image() -> str:
    """The tag of an image that can run this machine's interpreter.

    Builds it if it is missing. Raises NoEngine.
    """
    base = base_image()
    docker("build", "--target", "node", "--build-arg", f"BASE={base}", "--tag", NODE, str(ROOT))
    return NODE


def base_image() -> str:
    """The tag of the base image, which is made now if it is missing. Raises NoEngine."""
    if docker("images", "--quiet", BASE):
        return BASE
    print("making a base image of the distribution's packages; about a minute, once", flush=True)
    need_package("debootstrap", "debootstrap")
    release = platform.freedesktop_os_release()
    folder = Path(tempfile.mkdtemp(prefix="elastic-base-"))
    try:
        _bootstrap(release.get("VERSION_CODENAME", "stable"), release["ID"], folder)
        _import(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return BASE


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


def mirror() -> str | None:
    """The URL from which this machine installs packages, without credentials; None if unknown."""
    apt = Path("/etc/apt")
    files = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    for text in (file.read_text(errors="replace") for file in files if file.is_file()):
        for paragraph in text.split("\n\n"):
            if codename in paragraph and (found := _url(paragraph, codename)):
                return found
    return None


def _url(paragraph: str, codename: str) -> str | None:
    """The first URL of a sources list that offers the release itself; deb822 or one-line format."""
    for line in paragraph.splitlines():
        words = line.split("#")[0].split()
        urls = [word for word in words if urlsplit(word).scheme in ("http", "https", "file")]
        is_deb822 = line.startswith("URIs:") and any(
            codename in other.split()[1:] for other in paragraph.splitlines() if other.startswith("Suites:")
        )
        is_one_line = words[:1] == ["deb"] and codename in words
        if urls and (is_deb822 or is_one_line):
            return urls[0]
    return None


def _bootstrap(codename: str, distribution: str, folder: Path) -> None:
    url = mirror()
    words = ["debootstrap", "--variant=minbase", f"--include={INCLUDE}"]
    keyring = KEYRINGS / f"{distribution}-archive-keyring.gpg"
    if keyring.exists():
        words.append(f"--keyring={keyring}")
    words += [codename, str(folder), *([url] if url else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoEngine(
            f"expected a base system by `{' '.join(words)}`, found: {' / '.join(done.stdout.splitlines()[-3:])}; "
            f"or make one by hand: docker pull {PULLED} && docker tag {PULLED} {BASE}"
        )
    # This machine's interpreter may be mounted below /root, and nodes run as another user.
    (folder / "root").chmod(0o755)
    for waste in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
        shutil.rmtree(folder / waste, ignore_errors=True)


def _import(folder: Path) -> None:
    archive = subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE)
    assert archive.stdout is not None
    subprocess.run(["docker", "import", "-", BASE], stdin=archive.stdout, check=True, capture_output=True)
    if archive.wait():
        raise NoEngine("tar could not read the base system that debootstrap made")
