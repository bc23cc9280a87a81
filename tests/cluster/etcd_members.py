"""An etcd cluster runs before the first node starts, each member on a machine of its own."""

from cluster import SCRATCH, Cluster
from etcd_servers import etcd_program


class EtcdMembers:
    def __init__(self, cluster: Cluster, count: int) -> None:
        self._cluster = cluster
        self.names = [f"e{place}" for place in range(1, count + 1)]

    @property
    def endpoints(self) -> str:
        """In the form of --rdzv-endpoint."""
        return ",".join(f"{self._cluster.address(name)}:2379" for name in self.names)

    def start(self) -> None:
        if not self.names:
            return
        program = etcd_program()
        peers = {name: f"http://{self._cluster.address(name)}:2380" for name in self.names}
        cluster = ",".join(f"{name}={url}" for name, url in peers.items())
        services = {}
        for name, peer in peers.items():
            client = f"http://{self._cluster.address(name)}:2379"
            services[name] = [
                *(str(program), "--name", name, "--data-dir", f"{SCRATCH}/etcd"),
                # Kept when the case fails. Only this logger writes to a file; etcd 3.4 has
                # another one by default.
                *("--logger", "zap", "--log-outputs", f"{SCRATCH}/etcd.log"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", cluster),
            ]
        self._cluster.serve(services, programs=(program,))
