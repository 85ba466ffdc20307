"""Starts an MPI program across the hosts of a lab, by Open MPI's mpirun on host 0."""

import shutil
from collections.abc import Sequence

from .network import Lab, LabError
from .ranks import Program, require_command

# mpirun calls this in place of ssh, as AGENT ADDRESS COMMAND..., and so gets from host to host. Each host has a name of
# its own there: Open MPI names folders by it, and daemons of one name would share one.
_AGENT = """#!/bin/sh
host=$1
shift
number=$((${{host##*.}} - 1))
exec ip netns exec "tw{id}-h$number" unshare --uts sh -c "hostname h$number; $*"
"""


def mpi_programs(lab: Lab, command: Sequence[str], per_host: int = 1) -> list[Program]:
    """mpirun with `per_host` processes of the command on each host; addresses serve as host names."""
    mpirun = shutil.which("mpirun")
    if not mpirun:
        raise LabError("mpirun not found: install Open MPI, on Debian the package openmpi-bin")
    require_command(command)
    agent = lab.folder / "agent"
    agent.write_text(_AGENT.format(id=lab.id))
    agent.chmod(0o755)
    hosts = lab.folder / "hosts"
    hosts.write_text("".join(f"{host.address} slots={per_host}\n" for host in lab.hosts))
    scratch = lab.folder / "tmp"  # goes with the lab, however it ends
    scratch.mkdir()
    settings = {
        "plm_rsh_agent": str(agent),
        "plm_rsh_no_tree_spawn": "1",
        "oob_tcp_if_include": "eth0",
        "btl": "tcp,self",
        "btl_tcp_if_include": "eth0",
        "orte_tmpdir_base": str(scratch),
        "hwloc_base_binding_policy": "none",
    }
    start = [mpirun, "--allow-run-as-root", "--hostfile", str(hosts), "-np", str(per_host * len(lab.hosts))]
    for name, value in settings.items():
        start += ["--mca", name, value]
    return [Program("mpirun", 0, [*start, *command])]
