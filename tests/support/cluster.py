"""A Slurm cluster of two nodes on this machine, for tests that run as root.

Starts the daemons of Debian's packages slurm-wlm and munge in a temporary folder. The nodes are two
slurmd on one host: they share its network, its files and its cores. Each has two fake GPUs.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

NODES = {"n1": 17901, "n2": 17902}
# The default path of Slurm's commands, because jobs do not inherit the variable SLURM_CONF.
CONF = Path("/etc/slurm/slurm.conf")

SLURM_CONF = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=17900
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# Limits how long a requeued job waits.
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=10
KillWait=30
MinJobAge=3600
GresTypes=gpu
SlurmdParameters=config_overrides
{nodes}
# The time of tests/configs/slurm.yaml, and no more.
EnforcePartLimits=ALL
PartitionName=gpu Nodes=ALL Default=YES MaxTime=02:00:00 DefMemPerCPU=500 GraceTime=60
PartitionName=cpu Nodes=ALL MaxTime=02:00:00 DefMemPerCPU=500 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=02:00:00 DefMemPerCPU=500 PriorityTier=2
"""
NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=64000"
    " Gres=gpu:2\n"
)
GRES_CONF = """
AutoDetect=off
NodeName=n[1-2] Name=gpu File=/dev/null
NodeName=n[1-2] Name=gpu File=/dev/zero
"""
CGROUP_CONF = """
CgroupPlugin=cgroup/v1
CgroupAutomount=no
"""


class Cluster:
    """The daemons, and the state of the jobs."""

    def __init__(self, folder):
        self.folder, self.daemons = folder, {}

    def start(self):
        """Start all daemons; return when both nodes are idle."""
        for name in ("munge", "state", *(f"spool/{name}" for name in NODES)):
            (self.folder / name).mkdir(parents=True)
        nodes = "".join(NODE.format(name=name, port=port) for name, port in NODES.items())
        conf = SLURM_CONF.format(folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(GRES_CONF)
        (self.folder / "cgroup.conf").write_text(CGROUP_CONF)
        CONF.parent.mkdir(exist_ok=True)
        # A run that was killed leaves its link.
        CONF.unlink(missing_ok=True)
        CONF.symlink_to(self.folder / "slurm.conf")
        self._start_munge()
        self._daemon("slurmctld", "slurmctld", "-D", "-i")
        for name in NODES:
            self.start_node(name)
        wait_until(lambda: self.states() == dict.fromkeys(NODES, "idle"), 30)

    def _start_munge(self):
        """Start a munged with its key, socket and other files in the folder."""
        folder = self.folder / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        # munged checks that no other user owns the parent folders.
        self._daemon("munged", "munged", "-F", "-f", f"--key-file={key}", *options)
        wait_until((folder / "socket").exists, 10)

    def start_node(self, name):
        self._daemon(name, "slurmd", "-D", "-N", name)

    def _daemon(self, name, *command):
        with (self.folder / f"{name}.out").open("a") as output:
            self.daemons[name] = subprocess.Popen(
                command,
                # They read gres.conf and cgroup.conf from the same folder.
                env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill_node(self, name, job):
        """Kill a node at once: its daemon and every process of its job."""
        self.daemons[name].kill()
        self.daemons.pop(name).wait()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                manager = f"slurmstepd: [{job}.".encode() in (process / "cmdline").read_bytes()
                environment = (process / "environ").read_bytes().split(b"\0")
                if manager or f"SLURM_JOB_ID={job}".encode() in environment:
                    os.kill(int(process.name), signal.SIGKILL)

    def stop(self):
        """Cancel all jobs and stop all daemons."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--user=root")
            wait_until(lambda: not self.run("squeue", "--noheader").strip(), 20)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        if CONF.is_symlink() and CONF.readlink() == self.folder / "slurm.conf":
            CONF.unlink()

    def run(self, *command):
        """Return the output of a Slurm command."""
        return subprocess.run(
            command, check=True, timeout=90, stdout=subprocess.PIPE, text=True
        ).stdout

    def states(self):
        """Return the state of each node."""
        lines = self.run("sinfo", "--Node", "--noheader", "--partition=gpu", "--format=%N %t")
        return dict(line.split() for line in lines.splitlines())

    def jobs(self):
        """Return all jobs so far, oldest first, as the fields that scontrol shows."""
        lines = self.run("scontrol", "--oneliner", "show", "job").splitlines()
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines if "JobId" in line]


def wait_until(condition, seconds):
    """Wait until a condition holds. Raises TimeoutError after this number of seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)
