"""This machine -> a plain mapping for a run record; a new fact is one line of describe_machine.

Nothing here names the host, the user or a path. What cannot be read is None, never a guess. On
Linux all is read from files, under a root that tests replace; other systems are asked otherwise.
"""

import contextlib
import ctypes
import gc
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from edge_eval import __version__

ROOT = Path("/")

# Instruction sets that change an inference's speed or an int8 answer, by their names here ->
# their spellings in Linux's /proc/cpuinfo, macOS's sysctl and py-cpuinfo, lower case.
INSTRUCTION_SETS = {
    "sse4_2": ("sse4_2",),
    "avx": ("avx", "avx1_0"),
    "avx2": ("avx2", "avx2_0"),
    "fma": ("fma",),
    "f16c": ("f16c",),
    "avx_vnni": ("avx_vnni",),
    "avx512f": ("avx512f",),
    "avx512_vnni": ("avx512_vnni", "avx512vnni"),
    "avx512_bf16": ("avx512_bf16",),
    "amx_int8": ("amx_int8",),
    "amx_bf16": ("amx_bf16",),
    "neon": ("neon", "asimd", "advsimd"),
    "dotprod": ("asimddp", "feat_dotprod"),
    "i8mm": ("i8mm", "feat_i8mm"),
    "bf16": ("bf16", "feat_bf16"),
    "sve": ("sve",),
}


def describe_machine(root: Path = ROOT) -> dict[str, Any]:
    """Return what a run's speed and answers may depend on, as JSON can hold it."""
    import psutil

    cpu_model, flags = _cpu(root)
    memory = psutil.virtual_memory()
    return {
        "os": platform.system(),
        "platform": platform.platform(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "architecture": platform.machine(),
        "cpu_model": cpu_model,
        "instruction_sets": None if flags is None else instruction_sets(flags),
        **count_cores(root),
        "memory_total_bytes": int(memory.total),
        "memory_available_bytes": int(memory.available),
        "memory_limit_bytes": memory_limit(root),
        "address_space_limit_bytes": _process_limit("RLIMIT_AS"),
        "versions": {
            "edge_eval": __version__,
            **{name: _version(name) for name in ("onnxruntime", "numpy", "tokenizers")},
        },
        **_power(),
        "thermal_throttle_count": thermal_throttle_count(root),
        "load_average_1min": _load_average(),
    }


def usable_cores(root: Path = ROOT) -> int:
    """Return the default number of threads: physical cores this process may use and has time on.

    The affinity mask may hold both threads of a core, which counts once. A quota of 1.5 cores is
    rounded to 2: two threads then do more than one, though they are made to pause.
    """
    return int(count_cores(root)["n_usable_cores"] or 1)


def count_cores(root: Path = ROOT) -> dict[str, int | float | None]:
    """Cores of the machine, of this process's affinity mask and of its control group's quota."""
    import psutil

    online = _cpu_list(_read(root / "sys/devices/system/cpu/online"))
    allowed = _cpu_list(_read_fields(root / "proc/self/status").get("Cpus_allowed_list"))
    if allowed is not None and online is not None:
        allowed &= online  # the mask also names CPUs that could be plugged in
    elif allowed is None and hasattr(psutil.Process, "cpu_affinity"):  # not on macOS
        allowed = set(psutil.Process().cpu_affinity())
    n_logical = len(online) if online else os.cpu_count()
    n_physical = _count_physical(root, online) or psutil.cpu_count(logical=False)
    quota = cpu_quota(root)
    limits = (
        _count_physical(root, allowed) or n_physical or n_logical,
        len(allowed) if allowed else None,
        None if quota is None else math.floor(quota + 0.5),
    )
    return {
        "n_logical_cores": n_logical,
        "n_physical_cores": n_physical,
        "n_affinity_cores": len(allowed) if allowed else None,
        "cpu_quota_cores": quota,
        "n_usable_cores": max(1, min(n for n in limits if n is not None)),
    }


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU time a second allowed by the control groups, in cores: the least of all levels."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        # Version 2 writes "quota period" or "max period"; version 1 has two files, -1 for none.
        quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
        quota = quota or _read(folder / "cpu.cfs_quota_us") or ""
        period = period or _read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes allowed by the control groups, the least of all levels, or by the process's limit."""
    data_limit = _process_limit("RLIMIT_DATA")
    limits = [] if data_limit is None else [data_limit]
    for folder in _cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name) or ""
            if text.isdigit() and int(text) < 2**62:  # version 1 writes nearly 2**63 for none
                limits.append(int(text))
    return min(limits, default=None)


def _process_limit(name: str) -> int | None:
    """A limit of this process (ulimit), in bytes; None where there is none, or no such thing."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def thermal_throttle_count(root: Path = ROOT) -> int | None:
    """Sum over the CPUs how often core and package throttled since boot: compare two readings."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_count")
    counts = [text for text in map(_read, files) if text is not None]
    return sum(map(int, counts)) if counts else None


def release_memory() -> None:
    """Give freed memory back to the system: glibc keeps it, a tokenizer's 300 MB beside a model."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def peak_memory(root: Path = ROOT) -> dict[str, int | None]:
    """Return the most this process has had resident, and its own and file-mapped parts now.

    Linux's getrusage is no stand-in where VmHWM is missing: it keeps the parent's peak over exec.
    """
    status = _read_fields(root / "proc/self/status")
    peak = _kib(status.get("VmHWM"))
    if platform.system() == "Darwin":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes there
    elif platform.system() == "Windows":
        import psutil

        peak = int(psutil.Process().memory_info().peak_wset)
    return {
        "peak_memory_bytes": peak,
        "rss_anon_bytes": _kib(status.get("RssAnon")),
        "rss_file_bytes": _kib(status.get("RssFile")),
    }


def read_energy_j(root: Path = ROOT) -> float | None:
    """Joules counted so far by the CPU packages (RAPL), memory and the rest not among them.

    None where any package cannot be read: since 2020 most kernels let only root. Only differences
    mean something, and each counter starts again at its max_energy_range_uj, often 262 kJ, which
    is about an hour at 70 W: read more often than that, and drop a difference below 0.
    """
    total_uj = 0
    zones = [  # intel-rapl:0:1 and such are parts of a package; AMD's are called the same
        zone
        for zone in (root / "sys/class/powercap").glob("intel-rapl:*")
        if zone.name.count(":") == 1 and (_read(zone / "name") or "").startswith("package")
    ]
    for zone in zones:
        energy = _read(zone / "energy_uj")
        if energy is None:
            return None
        total_uj += int(energy)
    return total_uj / 1e6 if zones else None


def instruction_sets(flags: Iterable[str]) -> list[str]:
    """Those of INSTRUCTION_SETS among a CPU's flags, in that order."""
    present = {flag.lower() for flag in flags}
    return [name for name, spellings in INSTRUCTION_SETS.items() if present.intersection(spellings)]


def _cpu(root: Path) -> tuple[str | None, list[str] | None]:
    """Find the CPU's name and flags."""
    if fields := _read_fields(root / "proc/cpuinfo"):
        part = f"implementer {fields.get('CPU implementer')}, part {fields.get('CPU part')}"
        model = (  # x86 says its name; ARM the board's, or two numbers
            fields.get("model name")
            or _read(root / "sys/firmware/devicetree/base/model")
            or fields.get("Hardware")
            or (part if "CPU part" in fields else None)
        )
        flags = fields.get("flags", fields.get("Features"))
        return model, None if flags is None else flags.split()
    if platform.system() == "Darwin":
        return _sysctl_cpu()
    # py-cpuinfo starts processes and takes over a second, so it is the last resort. It does not
    # know AVX-VNNI, BF16 and AMX: on Windows their absence proves nothing.
    import cpuinfo

    info = cpuinfo.get_cpu_info()  # empty for an architecture it does not know
    return info.get("brand_raw"), info.get("flags")


def _sysctl_cpu() -> tuple[str | None, list[str] | None]:
    try:
        text = subprocess.run(
            ["/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw.optional"],
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=10,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None, None
    return parse_sysctl(text)


def parse_sysctl(text: str) -> tuple[str | None, list[str] | None]:
    """Find the CPU's name and flags in what macOS's sysctl prints: ``hw.optional.avx2_0: 1``."""
    values = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    flags = [key.rpartition(".")[2] for key, value in values.items() if value == "1"]
    return values.get("machdep.cpu.brand_string"), flags or None


def _count_physical(root: Path, cpus: set[int] | None) -> int | None:
    """Distinct cores behind these logical CPUs."""
    cores = set()
    for cpu in cpus or ():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        if siblings is None:
            return None
        cores.add(siblings)
    return len(cores) or None


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control groups, from the outermost it can see, in both versions."""
    memberships = [
        line.split(":", 2) for line in (_read(root / "proc/self/cgroup") or "").splitlines()
    ]
    groups = {name: path for _, names, path in memberships for name in names.split(",")}
    folders: list[Path] = []
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        mount, _, file_system = line.partition(" - ")
        mount_root, mount_point = mount.split()[3:5]
        kind, *_, options = file_system.split()
        if kind == "cgroup2":
            group = PurePosixPath(groups.get("", "/"))  # version 2's line names no controller
        elif kind == "cgroup" and controller in options.split(","):
            group = PurePosixPath(groups.get(controller, "/"))
        else:
            continue
        # In a container the group's path may be the host's, and lie outside what is mounted.
        visible = group.is_relative_to(mount_root) and ".." not in group.parts
        parts = group.relative_to(mount_root).parts if visible else ()
        top = root / mount_point.lstrip("/")
        folders += [top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return folders


def _power() -> dict[str, float | bool | None]:
    import psutil

    try:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    except (OSError, ValueError):  # firmware that answers nonsense
        battery = None
    return {
        "battery_percent": None if battery is None else float(battery.percent),
        "on_ac_power": None if battery is None else battery.power_plugged,
    }


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # not on Windows
    except OSError:
        return None


def _version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _read(path: Path) -> str | None:
    """Read a small system file, or None where it is absent or forbidden."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0 \n")
    except OSError:
        return None


def _read_fields(path: Path) -> dict[str, str]:
    """Read the first value of each ``key : value``; empty where there is no file."""
    fields: dict[str, str] = {}
    for line in (_read(path) or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _cpu_list(text: str | None) -> set[int] | None:
    """``0-2,8`` as a set of numbers."""
    if not text:
        return None
    ranges = [part.partition("-") for part in text.split(",")]
    return {cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)}


def _kib(text: str | None) -> int | None:
    """``1664 kB`` in bytes."""
    return int(text.split()[0]) * 1024 if text else None
