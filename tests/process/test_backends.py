"""Groups whose state is outside the run directory: whichever part dies, the result is the same."""

import socket
from contextlib import suppress

from etcd_servers import end_stores, free_port

from elastic.rendezvous.backends.host import HostBackend


def test_etcd_that_lost_its_data_costs_no_step(drill, undisturbed, own_etcd):
    """It is away for a moment, and comes back empty. The agent says so, and a node that is told to
    leave loses nothing.
    """
    servers = own_etcd()
    drill.shut(13)
    where = ("--rdzv-backend", "etcd", "--rdzv-endpoint", servers.endpoints, "--max-nodes", "2")
    where += ("--last-call", "0s", "--grace", "14s")
    agent = drill.start_before(6, *where)
    servers.kill(0)
    drill.waits_for(lambda: "training goes on" in agent.output, "the loss being said")
    servers.wipe(0)
    servers.start(0)
    servers.wait_ready()
    drill.waits_for(lambda: "it was deleted" in agent.output, "the loss of data being said")
    drill.open(6)
    drill.drains(agent, 13)
    drill.ends_like(undisturbed, drill.start(*where))
    assert drill.values("restored", "step", "lost_steps") == [(0, 0), (13, 0)]


def test_with_c10d_a_lost_host_ends_the_run_with_all_saved(drill, undisturbed):
    """Instead of the store a process listens that never answers, like a frozen host. A node
    finishes what it can without it. To a node that comes after the end the run directory alone says
    how the run did.
    """
    port = free_port()
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    drill.shut(10)
    host = HostBackend(f"127.0.0.1:{port}", "unused")
    host.shown()
    connections, serve = [], host._server.process_request
    host._server.process_request = lambda made, where: serve(connections.append(made) or made, where)
    # An uploader waits 5 s for its agent in place of 15: each new interpreter reads the file.
    (drill.folder / "sitecustomize.py").write_text("import elastic.uploader.fence as f\nf.SILENT_S = 5.0\n")
    env = {"PYTHONPATH": str(drill.folder)}
    options = ("--snapshot-every", "1", *where)
    agent = drill.start(*options, "--nproc-per-node", "2", "--rdzv-timeout", "10s", env=env)
    drill.stands(10, ranks=2)
    end_stores(host)
    for made in connections:
        with suppress(OSError):
            made.shutdown(socket.SHUT_RDWR)
    with socket.create_server(("127.0.0.1", port)):
        drill.open(10)
        agent.ends_with(75)
    assert drill.last_step == len(undisturbed.chains)
    drill.ends_like(undisturbed, drill.start(*options))
    with socket.create_server(("127.0.0.1", port)):
        late = drill.start(*options)
        late.ends_with(0)
    assert " is finished: 24 steps " in late.output.splitlines()[-1]
