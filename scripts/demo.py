"""A pool on this machine, with simulated hosts; scripts/demo sets up and starts it.

Every step shows what a user would see and then verifies it by reading the pool's own
JSON, so that with --check the same script is a test. All state is in .demo/, all
addresses are loopback, and everything started here is ended here.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo_programs import BIN, DemoError, Program, Programs, until

ROOT = Path(__file__).resolve().parent.parent

# kind:name[,parameter]; what each kind is, is data of the simulation.
NODES = (
    "dgx-h100:h100-01",
    "dgx-h100:h100-02",
    "gb200-tray:tray-01,domain=rack-a",
    "gb200-tray:tray-02,domain=rack-a",
    "gb200-tray:tray-03,domain=rack-a",
    "gb200-tray:tray-04,domain=rack-a",
    "pcie-l40s:l40s-01",
    "gb10:spark-01",
)
# Of a GPU that tells its memory, so that there is a limit to see.
TENTH = ("--gpus", "0.1", "--model", "H100")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HOLDER_NODE = "l40s-01"
HOLDER_MEMORY_MIB = 2000

Row = dict[str, Any]


class Demo:
    """The pool, and one method for each step."""

    def __init__(self, state: Path, sockets: Path) -> None:
        self._state = state
        self._sockets = sockets
        self._step = 0
        self._address = ""
        logs = state / "logs"
        logs.mkdir(parents=True)
        # What the caller's shell says about another pool must not count here.
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("GPUPOOL_")}
        self._environment["PATH"] = f"{BIN}{os.pathsep}{self._environment.get('PATH', '')}"
        # Lets stand-ins for CUDA programs find the simulated host of their lease.
        self._environment["GPUPOOL_SIMULATED_NODES"] = str(sockets / "control" / "nodes")
        self._programs = Programs(logs, self._environment)

    def run(self) -> None:
        """All steps, in order; DemoError at the first one that is not as it should be."""
        self.start_allocator()
        self.start_hosts()
        self.show_pool()
        slice_id = self.take("a tenth of a GPU", TENTH, gpus=1, share_pct=10)
        whole_id = self.take("a whole GPU", ["--gpus", "1"], gpus=1, share_pct=100)
        gang = ["--gpus", "4", "--replicas", "4", "--model", "GB200"]
        gang_id = self.take("a gang of 16 GPUs, all or nothing", gang, gpus=16, share_pct=100)
        self.look_into_a_slice(slice_id)
        self.run_under_a_lease()
        self.kill_a_holder()
        self.catch_a_trespasser()
        self.give_back([slice_id, whole_id, gang_id])

    def start_allocator(self) -> None:
        """Starts the allocator on an empty SQLite store and ports that are free."""
        self.headline("start the allocator, on an SQLite store")
        ready = self._state / "allocator.json"
        allocator = self._programs.start(
            "gpupool-allocator",
            [
                "gpupool-allocator",
                *("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"),
                *("--state-dir", self._state / "allocator", "--ready-file", ready),
            ],
        )
        ports = self._programs.ready(allocator, ready)
        self._address = f"127.0.0.1:{ports['grpc']}"
        self._environment["GPUPOOL_ADDRESS"] = self._address
        self.verified(f"it serves gRPC on {self._address}, HTTP on 127.0.0.1:{ports['http']}")

    def start_hosts(self) -> None:
        """Starts one process that plays all the hosts, each with a real agent."""
        self.headline("start eight simulated hosts, each with its own agent")
        ready = self._state / "hosts.json"
        hosts = self._programs.start(
            "simulated-hosts",
            [
                *("python", "-m", "gpupool_agent.simulated", "--allocator", self._address),
                *("--control", self._sockets / "control", "--local-socket-dir", self._sockets),
                # A demo is watched: show what GPUs do sooner than the default.
                *("--usage-period-s", "1", "--telemetry-period-s", "1"),
                # Slices have real daemons of the control program's stand-in; each host has a
                # root helper, and ends what should not be on its GPUs.
                *("--mps-programs", "--helper", "--strays", "stop", "--ready-file", ready),
                *[word for node in NODES for word in ("--node", node)],
            ],
        )
        self._programs.ready(hosts, ready)

        def all_offered() -> bool:
            nodes, devices = self.rows("nodes"), self.rows("gpus")
            connected = [n for n in nodes if n["state"] == "NODE_STATE_CONNECTED"]
            return len(connected) == len(NODES) and all(
                d["state"] == "DEVICE_STATE_FREE" for d in devices
            )

        until("every host connected and every GPU confirmed clean", all_offered)
        self.verified(f"{len(NODES)} hosts are connected, every GPU is confirmed clean")

    def show_pool(self) -> None:
        """Shows hosts and GPUs."""
        self.headline("look at the pool")
        self.show("gpupool", "nodes")
        self.show("gpupool", "gpus")

    def take(self, what: str, flags: Sequence[str], *, gpus: int, share_pct: int) -> str:
        """Takes a lease and checks what it holds; returns its id."""
        self.headline(f"take {what}")
        before = {row["lease_id"] for row in self.rows("lease", "list")}
        self.show("gpupool", "lease", "create", *flags, "--ttl", "1h")
        (lease,) = [r for r in self.rows("lease", "list") if r["lease_id"] not in before]
        shares = [d for member in lease["members"] for d in member["place"]["devices"]]
        self.expect(lease["state"] == "LEASE_STATE_ACTIVE", f"the lease is {lease['state']}")
        self.expect(len(shares) == gpus, f"it holds {len(shares)} GPUs, not {gpus}")
        self.expect(
            all(share["share_pct"] == share_pct for share in shares),
            f"its shares are not {share_pct} %",
        )
        places = {member["place"]["node_id"] for member in lease["members"]}
        lease_id = str(lease["lease_id"])
        self.verified(f"{lease_id} is active on {', '.join(sorted(places))}")
        return lease_id

    def look_into_a_slice(self, lease_id: str) -> None:
        """Shows a slice's MPS daemon, and that it confines whatever comes through it."""
        self.headline("look into the slice: its MPS daemon, its limits, what it really gives")
        self.show("gpupool", "lease", "show", lease_id)
        (member,) = self.lease(lease_id)["members"]
        environment = member["environment"]
        (share,) = member["place"]["devices"]
        self.expect(len(member["given"]) == 1, "the share that is really given is not told")
        given = member["given"][0]
        client = ["-m", "gpupool_agent.simulated.cuda_client", "--seconds", "0"]
        seen = self.under(environment, *client, "--memory-mib", str(share["memory_mib"]))
        self.expect(seen.returncode == 0, f"a client of the slice failed: {seen.stderr}")
        said = json.loads(seen.stdout)
        self.expect(said["pipe"] == environment["CUDA_MPS_PIPE_DIRECTORY"], "it came not by MPS")
        self.expect(said["sm_count"] == given["sm_count"], f"it saw {said['sm_count']} SMs")
        self.verified(
            f"a client saw {said['sm_count']} SMs, {given['share_milli_pct'] / 1000:.3f} % of them"
        )
        loose = {k: v for k, v in environment.items() if k != "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"}
        greedy = self.under(loose, *client, "--memory-mib", str(int(share["memory_mib"]) + 1))
        self.expect("out of memory" in greedy.stderr, "a greedy client was not refused")
        self.verified("one that asks for more, and hides its limit, is refused by the server")
        bypass = self.under({**environment, "CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}, *client)
        self.expect("exclusive" in bypass.stderr, "a client that bypasses MPS was not refused")
        self.verified("one that bypasses MPS is refused by the GPU, which is exclusive")

    def under(
        self, environment: dict[str, str], *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs Python under a lease's environment, whatever comes of it."""
        return subprocess.run(
            [str(BIN / "python"), *arguments],
            env={**self._environment, **environment},
            stdin=subprocess.DEVNULL,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def lease(self, lease_id: str) -> Row:
        """A lease as the pool shows it now."""
        (row,) = [row for row in self.rows("lease", "list") if row["lease_id"] == lease_id]
        return row

    def run_under_a_lease(self) -> None:
        """Runs a command under a lease of its own and shows its environment."""
        self.headline("run a command under a lease, and see its environment")
        command = ["sh", "-c", "env | grep -E '^(CUDA|NCCL|GPUPOOL)_' | sort"]
        shown = self.show("gpupool", "run", "--gpus", "0.1", "--", *command)
        self.expect("CUDA_VISIBLE_DEVICES=GPU-" in shown, "CUDA_VISIBLE_DEVICES names no GPU")
        self.expect("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=" in shown, "no MPS limit is set")
        self.expect("GPUPOOL_LEASE_ID=" in shown, "the lease is not named")
        self.verified("the command saw its part of one GPU; its lease ended with it")

    def kill_a_holder(self) -> None:
        """Ends a holder with kill -9; nobody renews anything, and the GPU comes back.

        The holder's child outlives it. The lease is over, but the GPU stays out of the
        pool until its node has ended the child too.
        """
        self.headline("end a holder with kill -9 and see its GPU come back")
        holder = self.start_holder()
        device = until("the holder's memory to show on its GPU", self.device_in_use)
        used = device["telemetry"]["memory_used_mib"]
        uuid = device["device"]["uuid"]
        self.verified(f"process {holder.process.pid} holds {uuid}, {used} MiB in use")

        print(f"$ kill -9 {holder.process.pid}", flush=True)
        killed = time.monotonic()
        os.kill(holder.process.pid, signal.SIGKILL)
        until(f"{uuid} to be free", lambda: self.row(uuid)["state"] == "DEVICE_STATE_FREE")
        took_s = time.monotonic() - killed
        self.show("gpupool", "events", "--subject", uuid)
        named, ended = self.last_events(uuid, "device.stray", "process.stopped")
        self.expect(
            named["details"]["pid"] == ended["details"]["pid"] != str(holder.process.pid),
            f"the holder's child is not named and ended: {named}, {ended}",
        )
        self.verified(
            f"its child, process {named['details']['pid']}, was named and ended by its node; "
            f"the GPU is confirmed clean and free again after {took_s:.1f} s"
        )
        self._programs.end(holder)

    def catch_a_trespasser(self) -> None:
        """A process takes a GPU that nobody gave it. It ignores SIGTERM, which does not help."""
        self.headline("start a process outside any lease: it is named, and ended by its node")
        row = next(row for row in self.rows("gpus") if row["node_id"] == HOLDER_NODE)
        uuid = row["device"]["uuid"]
        begun = time.monotonic()
        trespasser = self.start_trespasser(uuid)
        (stray,) = until("the trespasser to be named", lambda: self.row(uuid)["strays"])
        took_s = time.monotonic() - begun
        self.show("gpupool", "gpus", "--node", HOLDER_NODE)
        self.expect(stray["pid"] == trespasser.process.pid, f"{stray} is not the trespasser")
        self.expect(stray["uid"] == os.getuid(), f"{stray} is not of uid {os.getuid()}")
        self.expect("cuda_client" in stray["command"], f"its command is {stray['command']!r}")
        shown = self.row(uuid)
        self.expect(shown["state"] != "DEVICE_STATE_FREE", "its GPU is offered all the same")
        self.verified(
            f"after {took_s:.1f} s it is named: process {stray['pid']} of "
            f"{stray['user'] or stray['uid']}, {stray['command'].split()[0]}; its GPU is kept out"
        )
        until("the trespasser to be ended", lambda: trespasser.status() is not None)
        until(f"{uuid} to be free", lambda: self.row(uuid)["state"] == "DEVICE_STATE_FREE")
        (ended,) = self.last_events(uuid, "process.stopped")
        self.expect("SIGKILL" in ended["cause"], f"it was ended otherwise: {ended['cause']}")
        self.verified(
            "it was asked to end, and killed after its grace; the GPU is free again after "
            f"{time.monotonic() - begun:.1f} s"
        )
        self._programs.end(trespasser)

    def start_trespasser(self, uuid: str) -> Program:
        """Starts a stand-in for a CUDA program on a GPU, with nobody's leave."""
        node = self._sockets / "control" / "nodes" / HOLDER_NODE
        client = [BIN / "python", "-m", "gpupool_agent.simulated.cuda_client"]
        flags = ["--memory-mib", str(HOLDER_MEMORY_MIB), "--stubborn"]
        variables = [f"CUDA_VISIBLE_DEVICES={uuid}", f"GPUPOOL_SIMULATED_NODE={node}"]
        print(f"$ {' '.join([*variables, *map(str, client), *flags])} &", flush=True)
        return self._programs.start("trespasser", ["/usr/bin/env", *variables, *client, *flags])

    def last_events(self, subject: str, *kinds: str) -> list[Row]:
        """The latest event of each kind about a GPU."""
        rows = self.rows("events", "--subject", subject)
        found = [[row for row in rows if row["kind"] == kind] for kind in kinds]
        self.expect(all(found), f"of {', '.join(kinds)} not all are in the history of {subject}")
        return [each[-1] for each in found]

    def start_holder(self) -> Program:
        """Starts a stand-in for a CUDA program under ``gpupool run``, through the agent."""
        socket = self._sockets / f"{HOLDER_NODE}.sock"
        client = ["python", "-m", "gpupool_agent.simulated.cuda_client"]
        command = ["gpupool", "--address", f"unix:{socket}", "run", "--gpus", "1"]
        command += ["--model", "L40S", "--"]
        command += [*client, "--memory-mib", str(HOLDER_MEMORY_MIB), "--seconds", "600"]
        print(f"$ {' '.join(command)} &")
        return self._programs.start("holder", command)

    def row(self, uuid: str) -> Row:
        """A GPU as the pool shows it now."""
        (row,) = [row for row in self.rows("gpus") if row["device"]["uuid"] == uuid]
        return row

    def device_in_use(self) -> Row | None:
        """The GPU on which the holder's memory has shown up."""
        self._programs.check_alive()
        for row in self.rows("gpus"):
            used = int(row.get("telemetry", {}).get("memory_used_mib", 0))
            if row["node_id"] == HOLDER_NODE and row["lease_ids"] and used >= HOLDER_MEMORY_MIB:
                return row
        return None

    def give_back(self, lease_ids: Sequence[str]) -> None:
        """Releases what is left and checks that the pool is as it was."""
        self.headline("give everything back")
        for lease_id in lease_ids:
            self.show("gpupool", "lease", "release", lease_id)
        until(
            "every GPU to be free",
            lambda: all(row["state"] == "DEVICE_STATE_FREE" for row in self.rows("gpus")),
        )
        self.expect(self.rows("lease", "list") == [], "a lease is left")
        nodes = self._sockets / "control" / "nodes"
        daemons = [str(path) for path in nodes.glob("*/mps/*")]
        self.expect(daemons == [], f"MPS daemons have left {daemons}")
        self.verified("no lease and no MPS daemon is left, and every GPU is free")

    def invite(self) -> None:
        """Says what can be tried, and waits for Ctrl-C."""
        control = self._sockets / "control"
        print(
            f"\nThe pool stays up until Ctrl-C. In another terminal, try:\n\n"
            f"  export PATH={BIN}:$PATH GPUPOOL_ADDRESS={self._address}\n"
            f"  export GPUPOOL_SIMULATED_NODES={control / 'nodes'}\n"
            f"  gpupool top\n"
            f"  gpupool explain --gpus 9\n"
            f"  gpupool run --gpus 0.5 -- bash\n"
            f"  gpupool events --follow\n"
            f"  python -m gpupool_agent.simulated.inject --control {control} h100-01 gpu-lost 3\n"
            f"\nThe last line breaks a GPU of a simulated host; with --help it lists what else.\n"
            f"Logs are in {self._state / 'logs'}; {self._state} stays until the next demo.",
            flush=True,
        )
        while True:
            self._programs.check_alive()
            time.sleep(1)

    def stop(self) -> None:
        """Ends everything that was started, the last first."""
        killed = self._programs.stop()
        if killed:
            raise DemoError(f"had to be killed: {', '.join(killed)}")

    def rows(self, *words: str) -> list[Row]:
        """A listing as JSON."""
        listed = self.call("gpupool", *words, "-o", "json")
        rows: list[Row] = json.loads(listed.stdout)
        return rows

    def show(self, *command: str) -> str:
        """Runs a command and prints it with its output, as a user would see it."""
        print(f"$ {' '.join(quoted(word) for word in command)}", flush=True)
        output = self.call(*command).stdout
        print(output, end="", flush=True)
        return output

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of ours; DemoError unless it exits 0."""
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode != 0:
            self._programs.check_alive()
            raise DemoError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
        return done

    def headline(self, text: str) -> None:
        """Opens the next step."""
        self._step += 1
        print(f"\n--- {self._step}. {text}", flush=True)

    def verified(self, text: str) -> None:
        """Says what was just seen to be true."""
        print(f"ok: {text}", flush=True)

    def expect(self, truth: bool, otherwise: str) -> None:
        """DemoError unless it is so."""
        if not truth:
            raise DemoError(otherwise)


def quoted(word: str) -> str:
    """A word as one would type it."""
    return f'"{word}"' if " " in word else word


@contextmanager
def folders(state: Path) -> Iterator[tuple[Path, Path]]:
    """An empty state folder of our own, and a short one for sockets."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(f"another demo runs in {state}; stop it, or use --state DIR") from None
        for old in state.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
            elif old.name != "lock":
                old.unlink()
        # A socket's path has room for 107 characters; a checkout may lie deep.
        with tempfile.TemporaryDirectory(prefix="gpupool-demo-") as sockets:
            yield state, Path(sockets)


def main() -> int:
    """Runs the demo; with --check stops after the last step."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="unattended: stop after the last step")
    parser.add_argument(
        "--state", type=Path, default=ROOT / ".demo", help="where state and logs go"
    )
    options = parser.parse_args()
    # Whatever ends the demo (kill, a closed terminal) ends the pool as Ctrl-C does; that
    # itself is ignored where a shell started the demo in the background.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        with folders(options.state.resolve()) as (state, sockets):
            demo = Demo(state, sockets)
            try:
                demo.run()
                if not options.check:
                    demo.invite()
            finally:
                # A second Ctrl-C must not leave half of it behind.
                for number in STOP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                print("\nstopping everything", flush=True)
                demo.stop()
    except DemoError as error:
        print(f"\nFAILED: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 130 if options.check else 0
    print("everything was as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
