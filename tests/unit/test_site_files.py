"""Files that a site installs: current, complete, and removed completely."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurmdl import __version__, dl_options
from slurmdl.cli import links
from slurmdl.cli.main import COMMANDS, main
from slurmdl.errors import EXIT_STATUS_MEANINGS

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "packaging/systemd").iterdir())


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("site")
    done = run(sys.executable, ROOT / "tools/gen-manpages", into)
    assert done.returncode == 0, done.stderr
    return into


def test_man_pages_list_all_commands_options_and_statuses(written):
    page = (written / "slurmdl.1").read_text().replace(r"\-", "-")
    bold = set(re.findall(r"\\fB(.*?)\\fR", page))
    assert bold >= COMMANDS.keys()
    assert {name.partition("=")[0] for name in bold} >= {f"--{name}" for name in dl_options.LONG_OPTIONS}
    for command in ("doctor", "topology check", "topology convert", "links ingest", "links show", "sandbox up",
                    "audit", "replay", "preflight", "requeue", "bench run"):
        section = page.partition(f".SH {command.upper()}\n")[2].partition("\n.SH ")[0]
        usage = run(sys.executable, "-m", "slurmdl", *command.split(), "--help").stdout
        options = set(re.findall(r"^  (?:-\w(?: \w+)?, )?(--[a-z-]+)", usage, re.MULTILINE)) - {"--help"}
        assert options and options <= set(re.findall(r"\\fB(--[a-z-]+)", section)), command
    for status, meaning in EXIT_STATUS_MEANINGS.items():
        assert f".TP\n{status}\n{meaning.replace('-', '-')}" in page
    plugin = (written / "slurmdl-spank.8").read_text().replace(r"\-", "-")
    assert set(re.findall(r"\\fB--(dl-[a-z0-9-]+)", plugin)) == {*dl_options.SPANK_OPTIONS, "dl-rank-map"}
    assert "prometheus:" in (written / "slurmdl.yaml.5").read_text()


def test_help_and_man_pages_keep_paragraphs(written, capsys):
    with pytest.raises(SystemExit):
        main(["preflight", "--help"])
    assert re.search(r"program\s+starts\n\nCall it in a job script", capsys.readouterr().out)
    assert "program starts\n.PP\nCall it in a job script" in (written / "slurmdl.1").read_text()


def test_man_pages_have_no_groff_warnings(written):
    if not shutil.which("groff"):
        pytest.skip("groff is missing")
    for page in written.glob("*.[1-8]"):
        assert "@" not in page.read_text().replace("@version@", "")
        done = run("groff", "-man", "-Tutf8", "-ww", "-z", page)
        assert (done.returncode, done.stderr) == (0, ""), page.name


def test_bash_completion(written):
    if not shutil.which("bash"):
        pytest.skip("bash is missing")

    def complete(*words: str, program: str = "slurmdl") -> list[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        script = (f". {written}/slurmdl.bash; compopt() {{ :; }}; COMP_WORDS=({program} {quoted}); "
                  f'COMP_CWORD={len(words)}; _slurmdl {program}; printf "%s\\n" "${{COMPREPLY[@]}}"')
        return run("bash", "-c", script).stdout.split()

    assert complete("s") == ["sbatch", "srun", "simulate", "sandbox"]
    assert complete("links", "in") == ["ingest"]
    assert complete("topology", "check", "--off") == ["--offline"]
    assert complete("doctor", "--n") == ["--nodes"]
    assert complete("--dl-node-binding", "=", "n", program="dlsbatch") == ["nodelist"]
    assert complete("sbatch", "--dl-strategy", "=") == list(dl_options.STRATEGIES)
    assert complete("--dl-z", program="dlsbatch") == ["--dl-zone="]
    assert complete("sbatch", "--dl-node-binding=off", "job") == []
    assert "--step-starter=" in complete("--st", program="dlsrun")
    assert complete("bench", "r") == ["run", "report"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_start_existing_commands(unit):
    text = unit.read_text()
    started = re.findall(r"^ExecStart=(\S+) (\S+) (\S+)", text, re.MULTILINE)
    for program, command, subcommand in started:
        assert (program, command) == ("@bindir@/slurmdl", "links")
        with pytest.raises(SystemExit) as ended:
            links.build_parser().parse_args([subcommand, "--help"])
        assert ended.value.code == 0
    assert bool(started) == (unit.suffix == ".service")


def test_uninstall_removes_all_installed_files(tmp_path):
    root = tmp_path / "root"
    unrelated = root / "etc/passwd"
    unrelated.parent.mkdir(parents=True)
    unrelated.write_text("")
    make = ["make", "-s", "-C", ROOT / "packaging", f"DESTDIR={tmp_path / 'root'}", "prefix=/opt/site",
            f"build={tmp_path / 'build'}", f"PYTHON={sys.executable}"]
    for _ in range(2):
        done = run(*make, "install")
        assert done.returncode == 0, done.stderr
    installed = {f"/{path.relative_to(root)}" for path in root.rglob("*") if not path.is_dir()} - {"/etc/passwd"}
    assert installed == set(run(*make, "list").stdout.split())
    text = "".join(path.read_text() for path in (root / "etc/systemd/system").iterdir())
    assert "ExecStart=/opt/site/bin/slurmdl links ingest" in text and "@bin" not in text
    assert (root / "etc/slurmdl/slurmdl.yaml").read_text() == (ROOT / "etc/slurmdl.yaml").read_text()
    if shutil.which("systemd-analyze"):
        units = tmp_path / "units"
        units.mkdir()
        for unit in (root / "etc/systemd/system").iterdir():
            (units / unit.name).write_text(unit.read_text().replace("/opt/site/bin/slurmdl", "/bin/true"))
        done = run("systemd-analyze", "verify", "--man=no", *units.iterdir())
        shutil.rmtree(units)
        assert not [line for line in done.stderr.splitlines() if "slurmdl" in line], done.stderr
    site_config = root / "etc/slurmdl/slurmdl.yaml"
    site_config.write_text("plan_dir: /shared\n")
    assert run(*make, "install").returncode == 0
    assert run(*make, "uninstall").returncode == 0
    assert site_config.read_text() == "plan_dir: /shared\n"  # the site's changes stay
    assert run(*make, "purge").returncode == 0
    assert [path for path in root.rglob("*") if not path.is_dir()] == [unrelated]
    assert not (root / "etc/slurmdl").exists() and not list(root.rglob("slurmdl/*"))


@pytest.mark.parametrize("prefix", ["/usr", "/usr/local", "/opt/slurmdl", "/home/site/slurmdl"])
def test_units_are_installed_in_the_unit_path(prefix):
    search_path = ["/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system"]
    if shutil.which("systemd-analyze"):
        search_path = run("systemd-analyze", "--system", "unit-paths").stdout.split()
    listed = run("make", "-s", "-C", ROOT / "packaging", f"prefix={prefix}", "list").stdout.split()
    units = [Path(path) for path in listed if Path(path).name in {unit.name for unit in UNITS}]
    assert len(units) == len(UNITS)
    assert {str(unit.parent) for unit in units} <= set(search_path)


def test_purge_removes_only_files_of_the_package(tmp_path):
    """dpkg's postrm script on a temporary tree; files of sandboxes and of the site stay."""
    package_files = ["slurmdl/samples.db", "slurmdl-counters/spool/x"]
    other_files = ["slurmdl-sandbox/demo/log", "slurmdl-site/notes"]
    for name in (*package_files, *other_files):
        file = tmp_path / "var/lib" / name
        file.parent.mkdir(parents=True)
        file.touch()
    script = (ROOT / "packaging/deb/slurmdl.postrm").read_text().replace("/var/lib", f"{tmp_path}/var/lib")
    for user in ("passwd", "group"):
        script = script.replace(f"getent {user} slurmdl", "false")
    done = subprocess.run(["sh", "-s", "purge"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    remaining = {str(path.relative_to(tmp_path / "var/lib")) for path in tmp_path.rglob("*") if path.is_file()}
    assert remaining == set(other_files)
    spec = (ROOT / "packaging/rpm/slurmdl.spec").read_text()
    removal = re.search(r"^ *rm -rf .*$", script, re.MULTILINE)[0]
    assert removal.replace(f"{tmp_path}/var/lib", "/var/lib") in spec  # rpm removes the same


def test_packages_contain_the_same_files_without_git(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    known = run(ROOT / "tools/build-packages", "files")
    assert (known.returncode, known.stderr) == (0, "")
    tree = tmp_path / f"slurmdl-{__version__}"
    tree.mkdir()
    subprocess.run(["tar", "--null", "--files-from=-", "-c", "-f", tmp_path / "source.tar"], input=known.stdout,
                   text=True, cwd=ROOT, check=True, timeout=60)
    subprocess.run(["tar", "-x", "-f", tmp_path / "source.tar", "-C", tree], check=True, timeout=60)
    for built in ("build/packages/x.deb", ".venv/bin/python", "slurmdl/__pycache__/x.pyc", "slurmdl.egg-info/x"):
        (tree / built).parent.mkdir(parents=True, exist_ok=True)
        (tree / built).touch()
    without = run(tree / "tools/build-packages", "files")
    assert (without.returncode, without.stderr) == (0, "")
    hidden = {name for name in known.stdout.split("\0") if name.startswith(".")}  # of git and of editors
    assert set(without.stdout.split("\0")) == set(known.stdout.split("\0")) - hidden


def test_plugin_uninstall_removes_its_directory(tmp_path):
    if not Path("/usr/include/slurm/spank.h").exists():
        pytest.skip("libslurm-dev is missing")
    make = ["make", "-s", "-C", ROOT / "spank", f"DESTDIR={tmp_path}", "prefix=/usr", "libdir=/usr/lib/x"]
    assert run(*make, "install").returncode == 0
    assert (tmp_path / "usr/lib/x/slurm/slurmdl.so").stat().st_mode & 0o777 == 0o755
    assert run(*make, "uninstall").returncode == 0
    assert not (tmp_path / "usr/lib/x/slurm").exists()
