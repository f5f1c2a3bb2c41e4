"""How long this process has been there."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Seconds since the process was started; of its own processor time where the system does not tell."""
    try:
        # The command in brackets may hold blanks; the start, in clock ticks since the machine's, is field 22.
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.process_time()
