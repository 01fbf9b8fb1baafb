"""Makes the working environment: .venv with the locked dependencies, semel, Java for Spark, PostgreSQL, Chromium.
SEMEL_VENV names another folder than .venv, inside the checkout, for a second Python.

Uses only the standard library, because it runs before anything is installed. A stamp inside .venv says what was
installed; it is written last and removed first, so an interrupted run is noticed and starts from nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / os.environ.get("SEMEL_VENV", ".venv")
NAME = VENV.relative_to(ROOT)  # in messages
STAMP = VENV / ".semel-stamp"
JAVA_STAMP = VENV / ".semel-java"
LOCK = Path("requirements/dev.lock")
INSTALLER_LOCK = Path("requirements/installer.lock")
INPUTS = (LOCK, INSTALLER_LOCK, Path("pyproject.toml"), Path("scripts/environment.py"))
POSTGRES_STAMP = VENV / ".semel-postgres"
CHROMIUM_STAMP = VENV / ".semel-chromium"
POSTGRES_FOLDERS = "usr/lib/postgresql/*/bin"  # where Debian has it, outside of the PATH
JAVA_MIN = 17
JAVA_PACKAGES = ("openjdk-21-jre-headless", "openjdk-17-jre-headless", "default-jre-headless")


class SetupError(Exception):
    """Something the user has to put right; the message says what and how."""


def say(message: str) -> None:
    print(f"semel: {message}", file=sys.stderr, flush=True)


def run(*command: str | Path, env: dict[str, str] | None = None) -> bool:
    """Whether the command succeeded; its output goes to the terminal."""
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, env={**os.environ, **(env or {})}, check=False).returncode == 0


def main() -> int:
    os.chdir(ROOT)
    try:
        with only_one_at_a_time():
            make_environment()
            find_or_install_java()
            find_or_install_postgres()
            find_or_install_chromium()
    except SetupError as problem:
        say(str(problem))
        return 1
    except KeyboardInterrupt:
        say("setup interrupted; the next run starts it over")
        return 130
    return 0


@contextmanager
def only_one_at_a_time() -> Iterator[None]:
    """Two `make` at once must not install into the same folder; the second one waits."""
    (ROOT / ".cache").mkdir(exist_ok=True)
    with open(ROOT / ".cache" / "setup.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- Python ---


def fingerprint() -> str:
    """Changes when the dependencies, the interpreter or the folder do (a venv cannot be moved)."""
    digest = hashlib.sha256()
    for path in INPUTS:
        digest.update(path.read_bytes())
    digest.update(f"{ROOT}\n{sys.version_info[:2]}".encode())
    return digest.hexdigest()


def make_environment() -> None:
    wanted = fingerprint()
    installed = STAMP.read_text() if STAMP.exists() and runs(VENV / "bin/python") else None
    if installed == wanted:
        return
    started = time.monotonic()
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    say(f"installing the locked dependencies into {NAME} ({python}) ...")
    if installed is None or not same_interpreter():
        create_venv()
    STAMP.unlink(missing_ok=True)
    install_dependencies()
    install_semel()
    STAMP.write_text(wanted)
    say(f"the environment is ready after {time.monotonic() - started:.0f} s; the command is {NAME}/bin/semel")


def runs(python: Path) -> bool:
    return python.exists() and os.access(python, os.X_OK)


def same_interpreter() -> bool:
    """Whether the environment has the Python that runs this file (same minor version)."""
    return (VENV / f"bin/python{sys.version_info.major}.{sys.version_info.minor}").exists()


def create_venv() -> None:
    def attempt() -> bool:
        shutil.rmtree(VENV, ignore_errors=True)
        words = [sys.executable, "-m", "venv", str(VENV)]
        return subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode == 0

    if has_ensurepip() and attempt():
        return
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    say(f"{sys.executable} cannot make a virtual environment yet: the {package} package is missing")
    if apt_install(package) and attempt():
        return
    raise SetupError(
        f"could not create {NAME} with {sys.executable}. Install Python's venv module "
        f"(Debian and Ubuntu: apt-get install {package}), then run make again"
    )


def has_ensurepip() -> bool:
    """Debian splits it off into python3.x-venv, and `python -m venv` fails half-way without it."""
    words = [sys.executable, "-c", "import ensurepip, venv"]
    return subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode == 0


def install_dependencies() -> None:
    """With uv, which halves the time; with pip where uv cannot reach what pip can (mirrors set up for pip alone)."""
    if pip_install("--require-hashes", "-r", INSTALLER_LOCK) and uv("sync", "--require-hashes", LOCK, INSTALLER_LOCK):
        return
    say("uv could not install the dependencies, trying pip")
    if not pip_install("--require-hashes", "-r", LOCK):
        raise SetupError("could not install the dependencies in requirements/dev.lock; the output above says why")


def install_semel() -> None:
    options = ("--no-deps", "--no-build-isolation", "--editable", ".")
    if not (uv("install", *options) or pip_install(*options)):
        raise SetupError(f"could not install semel itself into {NAME}; the output above says why")


def pip_install(*options: str | Path) -> bool:
    return run(VENV / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options)


def uv(action: str, *options: str | Path) -> bool:
    program = VENV / "bin/uv"
    environment = {
        "VIRTUAL_ENV": str(VENV),
        "UV_HTTP_TIMEOUT": "60",
        "UV_NO_CONFIG": "1",
        "UV_SYSTEM_CERTS": "1",  # trust what the machine trusts, as pip does
    }
    return runs(program) and run(program, "pip", action, "--quiet", *options, env=environment)


# --- Java ---


def find_or_install_java() -> None:
    """Spark and the tests on Apache Kafka need it; the broker and the client do not, so its absence is no error."""
    known = Path(JAVA_STAMP.read_text()) if JAVA_STAMP.exists() else None
    if known and runs(known):
        return
    java = find_java()
    if java is None and apt_install(*JAVA_PACKAGES):
        java = find_java()
    if java is None:
        say("*" * 100)
        say(f"NO JAVA {JAVA_MIN} OR NEWER FOUND. The broker and the client work without it; Spark and Apache Kafka")
        say("do not, and their tests will be skipped. Install a runtime and have `java` on the PATH:")
        say("Debian, Ubuntu: apt-get install openjdk-17-jre-headless; Fedora: dnf install java-21-openjdk-headless;")
        say("macOS: brew install openjdk@21")
        say("*" * 100)
        return
    JAVA_STAMP.write_text(str(java))


def find_java() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    candidates = [Path(home) / "bin/java"] if home else []
    on_path = shutil.which("java")
    if on_path:
        candidates.append(Path(on_path))
    return next((java for java in candidates if runs(java) and java_version(java) >= JAVA_MIN), None)


def java_version(java: Path) -> int:
    """The major version, 0 if it does not run (macOS has a `java` that only says that there is none)."""
    answer = subprocess.run([str(java), "-version"], capture_output=True, text=True, check=False)
    if answer.returncode != 0 or '"' not in answer.stderr:
        return 0
    version = answer.stderr.split('"')[1]
    major = version.removeprefix("1.").split(".")[0].split("-")[0]
    return int(major) if major.isdigit() else 0


# --- PostgreSQL ---


def find_or_install_postgres() -> None:
    """The tests of tables start a server of their own; without its programs they are skipped."""
    known = Path(POSTGRES_STAMP.read_text()) if POSTGRES_STAMP.exists() else None
    if known and runs(known):
        return
    initdb = find_postgres()
    if initdb is None and apt_install("postgresql"):
        initdb = find_postgres()
    if initdb is None:
        say("*" * 100)
        say("NO POSTGRESQL FOUND. The tests of tables will be skipped. Install it (no server needs to run):")
        say("Debian, Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server;")
        say("macOS: brew install postgresql@16; or name the folder of its programs: SEMEL_POSTGRES")
        say("*" * 100)
        return
    POSTGRES_STAMP.write_text(str(initdb))


def find_postgres() -> Path | None:
    named = os.environ.get("SEMEL_POSTGRES")
    if named:
        return Path(named) / "initdb" if runs(Path(named) / "initdb") else None
    on_path = shutil.which("initdb")
    candidates = [*([Path(on_path)] if on_path else []), *Path("/").glob(f"{POSTGRES_FOLDERS}/initdb")]
    return next((initdb for initdb in candidates if runs(initdb)), None)


# --- Chromium ---


def find_or_install_chromium() -> None:
    """The tests of the page run in a real browser; without one they are skipped."""
    if CHROMIUM_STAMP.exists() and Path(CHROMIUM_STAMP.read_text()).exists():
        return
    browser = find_chromium()
    if browser is None and apt_install("chromium", "chromium-browser"):
        browser = find_chromium()
    if browser is None:
        say("*" * 100)
        say("NO CHROMIUM FOUND. The tests of the page will be skipped. Install it, or name it: SEMEL_CHROMIUM")
        say("Debian, Ubuntu: apt-get install chromium; Fedora: dnf install chromium; macOS: brew install chromium")
        say("*" * 100)
        return
    CHROMIUM_STAMP.write_text(str(browser))


def find_chromium() -> Path | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    candidates = [os.environ.get("SEMEL_CHROMIUM"), *map(shutil.which, names)]
    return next((Path(each) for each in candidates if each and Path(each).exists()), None)


# --- Debian ---

APT_LOCK_SECONDS = 600


def apt_install(*candidates: str) -> bool:
    """Installs the first of the packages that this Debian has; false elsewhere, without rights, or if told not to."""
    if os.environ.get("SEMEL_SYSTEM_PACKAGES") == "no" or not shutil.which("apt-get"):
        return False
    root = [] if os.geteuid() == 0 else sudo()
    if root is None:
        return False
    say(f"installing {' or '.join(candidates)} with apt-get (SEMEL_SYSTEM_PACKAGES=no forbids this) ...")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    log = [apt(root, environment, "update")]
    for package in candidates:
        log.append(apt(root, environment, "install", "-y", "--no-install-recommends", package))
        if log[-1].returncode == 0:
            return True
    for attempt in log:
        print(attempt.stdout, file=sys.stderr)
    return False


def apt(root: list[str], environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Waits for another apt-get, as a fresh machine often runs one. The output is only of interest when it fails."""
    return subprocess.run(
        [*root, "apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={APT_LOCK_SECONDS}", *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


def sudo() -> list[str] | None:
    """How to become root: asks for the password only where someone can type it."""
    if not shutil.which("sudo"):
        return None
    return ["sudo"] if sys.stdin.isatty() else ["sudo", "-n"]


if __name__ == "__main__":
    sys.exit(main())
