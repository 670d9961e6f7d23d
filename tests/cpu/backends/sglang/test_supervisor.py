"""The supervisor, with cheap children in the server's place: nothing of the tree may outlive its asker."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

import miles.backends.sglang.server as server_module

SUPERVISOR = Path(server_module.__file__).with_name("supervisor.py")

# A server that has a child which left its session and process group, as daemons do.
TREE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
grandchild = subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True)
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {child.pid} {grandchild.stdout.readline()}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def tree(tmp_path, scratch):
    """A parent process that runs a supervised tree: (parent, supervisor's pid, pids of the tree)."""
    pids = tmp_path / "pids"
    asker = textwrap.dedent(f"""
        import os, subprocess, sys, time
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", {str(SUPERVISOR)!r}, str(os.getpid()), {str(scratch)!r},
             sys.executable, "-c", {TREE!r}, {str(pids)!r}],
            stdin=subprocess.PIPE, start_new_session=True)
        print(process.pid, flush=True)
        sys.stdin.readline()
        process.stdin.close()
        print(process.wait(), flush=True)
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", asker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert parent.stdout is not None
    supervisor = int(parent.stdout.readline())
    assert wait_for(pids.exists)
    members = [int(pid) for pid in pids.read_text().split()]
    assert len(members) == 3 and all(map(alive, members))
    yield parent, supervisor, members
    for pid in [parent.pid, supervisor, *members]:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    parent.wait()


def test_parent_killed_by_sigkill_ends_the_whole_tree(tree, scratch):
    parent, supervisor, members = tree
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not any(map(alive, [supervisor, *members])))
    assert not scratch.exists()


def test_closed_pipe_ends_the_whole_tree_with_status_zero(tree, scratch):
    parent, supervisor, members = tree
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline().strip() == "0"
    assert not any(map(alive, [supervisor, *members]))
    assert not scratch.exists()


def test_sigterm_to_the_supervisor_ends_the_whole_tree(tree):
    _, supervisor, members = tree
    os.kill(supervisor, signal.SIGTERM)
    assert wait_for(lambda: not any(map(alive, [supervisor, *members])))


def test_first_process_killed_as_ray_kills_children_of_a_worker_ends_the_whole_tree(tree, scratch):
    _, supervisor, members = tree
    os.kill(supervisor, signal.SIGKILL)
    assert wait_for(lambda: not any(map(alive, members)) and not scratch.exists())


def test_second_process_killed_by_sigkill_takes_the_server_along(tree):
    _, supervisor, members = tree
    os.kill(psutil.Process(members[0]).ppid(), signal.SIGKILL)
    # Children of the server follow it by their own means (SGLang's do); nobody is left who could see to them.
    assert wait_for(lambda: not alive(members[0]) and not alive(supervisor))


def test_forked_child_of_the_asker_that_holds_the_pipe_does_not_keep_the_tree_alive(tmp_path, scratch):
    program = textwrap.dedent(f"""
        import os, subprocess, sys, time
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", {str(SUPERVISOR)!r}, str(os.getpid()), {str(scratch)!r}, "sleep", "600"],
            stdin=subprocess.PIPE, start_new_session=True)
        child = os.fork()
        if child == 0:
            time.sleep(600)
        print(process.pid, child, flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    supervisor, holder = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    try:
        assert wait_for(lambda: not alive(supervisor) and not scratch.exists())
    finally:
        os.kill(holder, signal.SIGKILL)


def test_semaphores_of_the_killed_are_unlinked(tmp_path, scratch):
    ready = tmp_path / "ready"
    program = (
        "import multiprocessing, sys, time; lock = multiprocessing.get_context('spawn').Lock();"
        f"open({str(ready)!r}, 'w').write(lock._semlock.name); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", SUPERVISOR, str(os.getpid()), scratch, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
    )
    assert wait_for(lambda: ready.exists() and ready.read_text() != "")
    semaphore = Path("/dev/shm") / f"sem.{ready.read_text().strip('/')}"
    assert semaphore.exists()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=20) == 0
    assert not semaphore.exists()


def test_server_that_ends_takes_its_tree_along(tree):
    _, supervisor, members = tree
    os.kill(members[0], signal.SIGKILL)
    assert wait_for(lambda: not any(map(alive, [supervisor, *members])))


@pytest.mark.parametrize(
    ("program", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137), ("pass", 0)]
)
def test_exit_status_of_the_server_is_passed_on(scratch, program, status):
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", SUPERVISOR, str(os.getpid()), scratch, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
    )
    assert process.wait(timeout=20) == status
    assert process.stdin is not None
    process.stdin.close()
