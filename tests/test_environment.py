import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from edge_eval.environment import (
    INSTRUCTION_SETS,
    count_cores,
    cpu_quota,
    describe_machine,
    instruction_sets,
    memory_limit,
    parse_sysctl,
    peak_memory,
    read_energy_j,
    release_memory,
    thermal_throttle_count,
    usable_cores,
)

CGROUP2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
CGROUP1 = (
    "22 1 0:5 / /proc rw - proc proc rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def plant(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def plant_cores(root: Path, siblings: list[str], allowed: str) -> Path:
    """Lay out a CPU with one entry of siblings per logical core, and an affinity mask."""
    cpus = "sys/devices/system/cpu"
    topology = {
        f"{cpus}/cpu{i}/topology/core_cpus_list": f"{text}\n" for i, text in enumerate(siblings)
    }
    return plant(
        root,
        {
            **topology,
            f"{cpus}/online": f"0-{len(siblings) - 1}\n",
            "proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{allowed}\n",
        },
    )


FOUR_CORES_EIGHT_THREADS = ["0,4", "1,5", "2,6", "3,7"] * 2


# --- this very machine


def test_this_machine_is_described_in_strict_json() -> None:
    machine = describe_machine()
    assert json.loads(json.dumps(machine, allow_nan=False)) == machine
    assert machine["memory_total_bytes"] >= machine["memory_available_bytes"] > 0
    assert machine["n_logical_cores"] >= machine["n_usable_cores"] >= 1
    assert machine["n_usable_cores"] == usable_cores()
    assert machine["versions"]["numpy"]
    assert machine["python"].endswith(".".join(map(str, sys.version_info[:3])))


def test_no_path_is_told() -> None:
    text = json.dumps(describe_machine())
    assert str(Path.home()) not in text or Path.home() == Path("/")
    assert str(Path.cwd()) not in text


def test_this_process_has_a_peak_no_lower_than_what_it_holds() -> None:
    before = peak_memory()["peak_memory_bytes"]
    assert before is not None
    ballast = bytearray(64 * 2**20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    memory = peak_memory()
    peak = memory["peak_memory_bytes"]
    assert peak is not None
    assert peak >= before
    assert peak >= len(ballast)
    if memory["rss_anon_bytes"] is not None:
        assert len(ballast) <= memory["rss_anon_bytes"] <= peak


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone keeps what is freed")
def test_freed_memory_goes_back_to_the_system() -> None:
    blocks = [bytes(4096) for _ in range(25_000)]
    last = blocks[-1]  # holds the heap's end, so that freeing alone gives nothing back
    del blocks
    before = peak_memory()["rss_anon_bytes"]
    release_memory()
    after = peak_memory()["rss_anon_bytes"]
    assert before is not None
    assert after is not None
    assert before - after > 50e6
    assert len(last) == 4096


def test_a_machine_that_tells_nothing_is_still_described(tmp_path: Path) -> None:
    machine = describe_machine(tmp_path)
    json.dumps(machine, allow_nan=False)
    assert machine["n_usable_cores"] >= 1
    assert machine["cpu_quota_cores"] is None
    assert machine["memory_limit_bytes"] is None
    assert machine["thermal_throttle_count"] is None


# --- the CPU


def test_an_x86_cpu_is_named_with_its_instruction_sets_in_a_fixed_order(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n"
            "flags\t\t: fpu amx_int8 fma avx512_vnni avx2 sse4_2 avx f16c avx_vnni\n\n"
            "processor\t: 1\nmodel name\t: Other\nflags\t\t: fpu\n"
        },
    )
    machine = describe_machine(tmp_path)
    assert machine["cpu_model"] == "Some CPU @ 2 GHz"
    assert machine["instruction_sets"] == [
        *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512_vnni", "amx_int8")
    ]


ARM_CPUINFO = (
    "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16 sve\n"
    "CPU implementer\t: 0x41\nCPU part\t: 0xd0b\n"
)


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({}, "implementer 0x41, part 0xd0b"),
        ({"sys/firmware/devicetree/base/model": "Raspberry Pi 5\0"}, "Raspberry Pi 5"),
    ],
)
def test_an_arm_cpu_is_named_by_its_board_or_its_part(
    tmp_path: Path, files: dict[str, str], name: str
) -> None:
    machine = describe_machine(plant(tmp_path, {"proc/cpuinfo": ARM_CPUINFO, **files}))
    assert machine["cpu_model"] == name
    assert machine["instruction_sets"] == ["neon", "dotprod", "i8mm", "bf16", "sve"]


def test_a_cpu_without_a_flags_line_has_unknown_instruction_sets_not_none_of_them(
    tmp_path: Path,
) -> None:
    machine = describe_machine(plant(tmp_path, {"proc/cpuinfo": "processor\t: 0\n"}))
    assert machine["instruction_sets"] is None
    assert machine["cpu_model"] is None


def test_what_macos_prints_becomes_a_name_and_instruction_sets() -> None:
    name, flags = parse_sysctl(
        "machdep.cpu.brand_string: Apple M2\nhw.optional.arm.FEAT_DotProd: 1\n"
        "hw.optional.arm.FEAT_I8MM: 1\nhw.optional.AdvSIMD: 1\nhw.optional.arm.FEAT_BF16: 0\n"
    )
    assert name == "Apple M2"
    assert instruction_sets(flags or []) == ["neon", "dotprod", "i8mm"]
    assert parse_sysctl("") == (None, None)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_spelling_of_an_instruction_set_is_known_in_any_case(name: str) -> None:
    for spelling in INSTRUCTION_SETS[name]:
        assert instruction_sets([spelling.upper()]) == [name]


# --- cores


def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    cores = count_cores(plant_cores(tmp_path, FOUR_CORES_EIGHT_THREADS, "0-7"))
    assert cores == {
        "n_logical_cores": 8,
        "n_physical_cores": 4,
        "n_affinity_cores": 8,
        "cpu_quota_cores": None,
        "n_usable_cores": 4,
    }


@pytest.mark.parametrize(
    ("allowed", "usable"), [("0-1", 2), ("0,4", 1), ("0,1,4,5", 2), ("3", 1), ("0-511", 4)]
)
def test_the_affinity_mask_limits_the_usable_cores(
    tmp_path: Path, allowed: str, usable: int
) -> None:
    assert usable_cores(plant_cores(tmp_path, FOUR_CORES_EIGHT_THREADS, allowed)) == usable


def test_older_kernels_name_the_siblings_otherwise(tmp_path: Path) -> None:
    root = plant_cores(tmp_path, ["0-1", "0-1"], "0-1")
    for cpu in (0, 1):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        (topology / "core_cpus_list").rename(topology / "thread_siblings_list")
    assert usable_cores(root) == 1


@pytest.mark.parametrize(
    ("quota", "usable"),
    [("20000", 1), ("100000", 1), ("150000", 2), ("240000", 2), ("390000", 4), ("9900000", 4)],
)
def test_the_quota_limits_the_usable_cores(tmp_path: Path, quota: str, usable: int) -> None:
    root = plant_cores(tmp_path, FOUR_CORES_EIGHT_THREADS, "0-7")
    plant(
        root,
        {
            "proc/self/mountinfo": CGROUP2,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": f"{quota} 100000\n",
        },
    )
    assert usable_cores(root) == usable


# --- control groups


def test_the_least_limit_of_nested_groups_holds_in_version_2(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    plant(
        tmp_path,
        {
            "proc/self/mountinfo": CGROUP2,
            "proc/self/cgroup": "0::/user.slice/job\n",
            f"{top}/user.slice/cpu.max": "150000 100000\n",
            f"{top}/user.slice/job/cpu.max": "max 100000\n",
            f"{top}/user.slice/memory.max": "max\n",
            f"{top}/user.slice/job/memory.max": "2147483648\n",
            f"{top}/other/cpu.max": "1000 100000\n",
        },
    )
    assert cpu_quota(tmp_path) == 1.5
    assert memory_limit(tmp_path) == 2**31


def test_version_1_has_a_hierarchy_for_each_controller(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/self/mountinfo": CGROUP1,
            "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box/inner\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "25000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1073741824\n",
        },
    )
    assert cpu_quota(tmp_path) == 2.0
    assert memory_limit(tmp_path) == 2**30


@pytest.mark.parametrize("group", ["/docker/abc", "/../../elsewhere", "/"])
def test_in_a_container_the_mounted_folder_is_the_group(tmp_path: Path, group: str) -> None:
    plant(
        tmp_path,
        {
            "proc/self/mountinfo": CGROUP1.replace("0:29 /", "0:29 /docker/abc"),
            "proc/self/cgroup": f"1:cpu,cpuacct:{group}\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(tmp_path) == 3.0


def test_groups_without_a_limit_and_no_groups_at_all_have_none(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    plant(
        tmp_path,
        {
            "proc/self/mountinfo": CGROUP2 + CGROUP1,
            "proc/self/cgroup": "4:memory:/\n0::/\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cpu_quota(tmp_path) is None
    assert memory_limit(tmp_path) is None


# --- memory, heat, energy


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are asked, not read")
def test_memory_is_read_in_bytes_and_missing_lines_are_none(tmp_path: Path) -> None:
    plant(tmp_path, {"proc/self/status": "VmHWM:\t    1664 kB\nRssFile:\t 8 kB\n"})
    assert peak_memory(tmp_path) == {
        "peak_memory_bytes": 1664 * 1024,
        "rss_anon_bytes": None,
        "rss_file_bytes": 8192,
    }


def test_throttle_counts_are_summed_and_times_are_not(tmp_path: Path) -> None:
    cpus = "sys/devices/system/cpu"
    plant(
        tmp_path,
        {
            f"{cpus}/cpu0/thermal_throttle/core_throttle_count": "3\n",
            f"{cpus}/cpu0/thermal_throttle/package_throttle_count": "4\n",
            f"{cpus}/cpu0/thermal_throttle/core_throttle_total_time_ms": "5000\n",
            f"{cpus}/cpu11/thermal_throttle/core_throttle_count": "1\n",
        },
    )
    assert thermal_throttle_count(tmp_path) == 8


def test_energy_is_the_sum_of_the_packages_without_their_parts(tmp_path: Path) -> None:
    assert read_energy_j(tmp_path) is None
    zones = "sys/class/powercap"
    plant(
        tmp_path,
        {
            f"{zones}/intel-rapl:0/name": "package-0\n",
            f"{zones}/intel-rapl:0/energy_uj": "1500000\n",
            f"{zones}/intel-rapl:0:0/name": "core\n",
            f"{zones}/intel-rapl:0:0/energy_uj": "900000\n",
            f"{zones}/intel-rapl:1/name": "package-1\n",
            f"{zones}/intel-rapl:1/energy_uj": "2500000\n",
            f"{zones}/intel-rapl:2/name": "psys\n",
            f"{zones}/intel-rapl:2/energy_uj": "9000000\n",
        },
    )
    assert read_energy_j(tmp_path) == 4.0


def test_energy_is_not_measured_when_a_package_cannot_be_read(tmp_path: Path) -> None:
    zones = "sys/class/powercap"
    plant(
        tmp_path,
        {
            f"{zones}/intel-rapl:0/name": "package-0\n",
            f"{zones}/intel-rapl:0/energy_uj": "1500000\n",
            f"{zones}/intel-rapl:1/name": "package-1\n",
        },
    )
    (tmp_path / zones / "intel-rapl:1" / "energy_uj").mkdir()
    assert read_energy_j(tmp_path) is None
