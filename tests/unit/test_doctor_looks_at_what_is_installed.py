"""The administrators' part: the plugin, its stamp, and the programs that slurm.conf names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tm_slurm import __version__
from tm_slurm.doctor import administration
from tm_slurm.doctor.administration import Stamp
from tm_slurm.doctor.settings import parse_config

RECORDED = Path(__file__).with_name("golden")
SPANK = Path(__file__).parents[2] / "spank"


def help_of(name: str) -> str:
    return (RECORDED / f"doctor_srun_help_{name}.txt").read_text()


def test_a_plugin_is_loaded_when_srun_knows_its_options(tmp_path: Path) -> None:
    plugin = Path("/usr/local/lib/tm_slurm/tm_slurm.so")
    assert administration.plugin_loaded(help_of("administered"), plugin).verdict == "pass"
    assert administration.plugin_loaded(help_of("healthy"), None).verdict == "warn"
    missing = Path("/nowhere/lib/tm_slurm/tm_slurm.so")
    finding = administration.plugin_loaded(help_of("mistakes"), missing)
    assert finding.verdict == "fail" and "there is no such file" in finding.meaning
    assert "--prefix /nowhere;" in finding.mend
    broken = tmp_path / "lib" / "tm_slurm" / "tm_slurm.so"
    broken.parent.mkdir(parents=True)
    broken.touch()
    said = help_of("mistakes").replace(str(missing), str(broken))
    assert "cannot open shared object file" in administration.plugin_loaded(said, broken).meaning
    assert "does not say why" in administration.plugin_loaded(help_of("healthy"), broken).meaning


def test_plugstack_is_followed_through_what_it_includes(tmp_path: Path) -> None:
    (tmp_path / "plugstack.conf").write_text("# ours\ninclude plugstack.conf.d/*.conf\n")
    (tmp_path / "plugstack.conf.d").mkdir()
    (tmp_path / "plugstack.conf.d" / "a.conf").write_text("optional /usr/lib/other.so\n")
    settings = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    assert administration.plugin_file(settings) is None
    ours = tmp_path / "elsewhere.conf"
    ours.write_text("  optional /opt/lib/tm_slurm/tm_slurm.so notify=/opt/x\n")
    (tmp_path / "plugstack.conf.d" / "b.conf").write_text(f"include {ours}\n")
    assert administration.plugin_file(settings) == Path("/opt/lib/tm_slurm/tm_slurm.so")
    assert administration.plugin_file({"PlugStackConfig": str(ours)}) is not None
    ours.write_text(f"include {ours}\n")
    assert administration.plugin_file(settings) is None, "a file that includes itself ends"


def test_the_makefile_stamps_what_the_doctor_expects(tmp_path: Path) -> None:
    words = ["make", "-s", "-C", str(SPANK), f"BUILD={tmp_path}", str(tmp_path / "build.h")]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    stamp = administration.stamp_of(tmp_path / "build.h")
    assert stamp is not None and (stamp.version, stamp.sources) == (
        __version__,
        administration.sources_here(),
    )
    finding = administration.plugin_build(Path("/p/lib/tm_slurm/tm_slurm.so"), stamp, f"{stamp.slurm}.3")
    assert finding.verdict == "pass" and stamp.sources in finding.found


@pytest.mark.parametrize(
    ("stamp", "verdict", "words"),
    [
        (None, "warn", "of an older tm_slurm"),
        (Stamp(__version__, "0" * 12, "22.05"), "warn", "other sources"),
        (Stamp("0.0.1", "0" * 12, "22.05"), "warn", "other sources"),
        (Stamp(__version__, "0" * 12, "23.02"), "fail", "does nothing"),
    ],
)
def test_a_plugin_of_another_build(stamp: Stamp | None, verdict: str, words: str) -> None:
    finding = administration.plugin_build(Path("/p/lib/tm_slurm/tm_slurm.so"), stamp, "22.05.8")
    assert finding.verdict == verdict and words in finding.meaning


def test_programs_are_wired_where_they_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "libexec" / "tm_slurm" / "prolog.d"
    folder.mkdir(parents=True)
    prolog = folder / "50-tm_slurm"
    settings = parse_config((RECORDED / "doctor_config_administered.txt").read_text())
    assert settings["Prolog"] == "/usr/local/libexec/tm_slurm/prolog.d/*"
    here = {key: value.replace("/usr/local", str(tmp_path)) for key, value in settings.items()}
    assert administration.wired(here, "Prolog", "…").verdict == "fail", "Slurm would drain nodes for it"
    prolog.touch()
    assert administration.wired(here, "Prolog", "…") == administration.passed("Prolog", str(prolog))
    (folder.parent / "health").touch()
    assert administration.wired(here, "HealthCheckProgram", "…").verdict == "pass"
    never = here | {"HealthCheckInterval": "0 sec"}
    assert administration.wired(never, "HealthCheckProgram", "…").verdict == "warn"
    assert administration.wired({}, "Epilog", "not told").meaning == "optional: not told"
    site = tmp_path / "site.d"
    site.mkdir()
    (site / "10-site").touch()
    assert administration.wired({"Epilog": f"{site}/*"}, "Epilog", "…").verdict == "warn"
    (site / "50-tm_slurm").touch()
    assert administration.wired({"Epilog": f"{site}/*"}, "Epilog", "…").verdict == "pass"
