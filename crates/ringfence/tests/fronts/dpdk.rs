//! Network cards under DPDK's virtio-user, on the network of `vhost-user net` and of other backends. On the first one testpmd is
//! the machine, and answers pings. On the others the machine is a kernel behind testpmd:
//!
//! ```text
//! Python ── TAP ── testpmd ── virtio-user ── [proxy or shield ──] backend ── its host: a server of HTTP
//! ```

use std::process::Command;

use ringfence_block::storage::testing::Random;

use crate::require;
use crate::support::needs::{Need, skip_what_is_not_installed};
use crate::support::{Lab, MOMENT, Running, eventually};

const TESTPMD: Need = Need::Program("dpdk-testpmd", "dpdk-dev");
const PING: Need = Need::Program("ping", "iputils-ping");

/// Addresses of the card.
const MAC: &str = "52:54:00:12:34:56";
const IP: &str = "10.9.0.2";
/// Maximum wait for testpmd, which takes long to start beside other programs.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(120);

/// Starts testpmd on a socket, with 64 MiB of memory without huge pages.
fn testpmd(lab: &Lab, socket: &str) -> Running {
    let device = format!("--vdev=net_virtio_user0,path={},mac={MAC}", lab.file(socket).display());
    let of_library = "--no-huge -m 64 --no-pci --no-shconf -l 0,1";
    let own = "--forward-mode=icmpecho --auto-start --total-num-mbufs=4096 --stats-period=1";
    let mut words = vec!["dpdk-testpmd"];
    words.extend(of_library.split(' '));
    words.extend([&device, "--"]);
    words.extend(own.split(' '));
    lab.spawn(&words)
}

#[test]
#[ignore = "long: testpmd occupies a core"]
fn card_is_served_to_dpdk_by_trust_pool_and_shield() {
    require!(Need::Guests, TESTPMD, PING);
    for (options, has_shield) in
        [("", false), ("--require-pool 64M", false), ("--require-pool 64M", true)]
    {
        let lab = Lab::new();
        let card = format!(
            "vhost-user net --socket backend --switch lab --address {IP}/24 --mac {MAC} \
             --status-socket status {options}"
        );
        let net = lab.serve(&[], &card);
        let shield = has_shield.then(|| lab.serve(&[], "shield --listen s --backend backend"));
        let machine = testpmd(&lab, if has_shield { "s" } else { "backend" });
        machine.wait_for_output("Port statistics");
        let ping = format!("ping -c 1 -w 60 {IP} && ping -c 20 -i 0.05 -s 1400 -w 60 {IP}");
        let guest = lab.script("-q --switch lab --address 10.9.0.3/24", &ping);
        let said = guest.succeed(PATIENCE);
        assert!(said.contains(", 0% packet loss"), "{said}");
        let words = [lab.program(), "status", "--socket", "status"];
        let state = lab.spawn(&words).succeed(MOMENT);
        let sees =
            if options.is_empty() { "sees all of the machine's memory" } else { "lent 64 MiB" };
        assert!(state.contains(sees), "{state}");
        drop((machine, shield, net));
    }
}

/// Addresses of a machine on the network of another backend, and of its gateway. passt forwards what is sent to the gateway to the
/// loopback address of its host.
const HERE: &str = "192.0.2.2/24";
const GATEWAY: &str = "192.0.2.1";
/// Bytes that the machine fetches.
const NOISE: usize = 4 << 20;

/// Options of testpmd that forwards between a device and the TAP `tap0`.
const FORWARD: &str =
    "--no-huge -m 64 --no-pci --no-shconf --no-telemetry -l 0,1 --vdev=net_tap0,iface=tap0";
const ALL_PACKETS: &str =
    "--forward-mode=io --auto-start --total-num-mbufs=4096 --stats-period=86400";

/// Returns a script that starts such a testpmd, and gives the TAP an address.
fn forward(device: &str, address: &str) -> String {
    format!(
        "dpdk-testpmd {FORWARD} --vdev={device} -- {ALL_PACKETS} &
         until ip address add {address} dev tap0 2>/dev/null; do sleep 0.1; done
         ip link set tap0 up"
    )
}

/// Starts a script as root of a user, a network and a mount namespace of its own. DPDK writes below /run.
fn apart(lab: &Lab, script: &str) -> Running {
    let script = format!("mount -t tmpfs run /run\nip link set lo up\n{script}");
    let namespaces = ["unshare", "--user", "--map-root-user", "--net", "--mount"];
    lab.spawn(&[&namespaces[..], &["sh", "-ec", &script]].concat())
}

/// Backend of another project, with a server of HTTP at the address that the machine's gateway stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Foreign {
    Passt,
    Testpmd,
}

impl Foreign {
    /// Starts the backend at the socket `backend`.
    fn start(self, lab: &Lab) -> Running {
        let server = |address: &str| format!("python3 -m http.server --bind {address} 8000");
        let script = match self {
            // Its addresses are those of the interface with the default route.
            Foreign::Passt => format!(
                "ip link add up0 type veth peer name out0
                 ip address add {HERE} dev up0
                 ip link set out0 up
                 ip link set up0 up
                 ip route add default via {GATEWAY}
                 {} &
                 exec passt --foreground --vhost-user --socket backend -D {GATEWAY} -S test",
                server("127.0.0.1")
            ),
            Foreign::Testpmd => {
                let forward =
                    forward("net_vhost0,iface=backend,queues=1", &format!("{GATEWAY}/24"));
                format!("{forward}\nexec {}", server(GATEWAY))
            }
        };
        let running = apart(lab, &script);
        let socket = lab.file("backend");
        assert!(eventually(PATIENCE, || socket.exists()), "{self:?} has no socket");
        running
    }
}

/// Returns `true` if the installed passt has vhost-user, as since January 2025.
fn has_passt_vhost_user() -> bool {
    let help = Command::new("passt").arg("--help").output();
    help.is_ok_and(|help| {
        [help.stdout, help.stderr]
            .iter()
            .any(|text| String::from_utf8_lossy(text).contains("--vhost-user"))
    })
}

#[track_caller]
fn check_foreign(backend: Foreign) {
    let noise: Vec<u8> = {
        let mut random = Random::new(53);
        (0..NOISE / 8).flat_map(|_| random.next_u64().to_ne_bytes()).collect()
    };
    for (command, options) in [(None, ""), (Some("pool-proxy"), "--pool 64M"), (Some("shield"), "")]
    {
        let lab = Lab::new();
        std::fs::write(lab.file("noise"), &noise).unwrap();
        let served = backend.start(&lab);
        let between = command
            .map(|command| lab.serve(&[command, "--listen", "s", "--backend", "backend"], options));
        let socket = lab.file(if command.is_some() { "s" } else { "backend" });
        let device = format!("net_virtio_user0,path={},mac={MAC}", socket.display());
        let fetch = format!(
            "{}
             until python3 -c 'import urllib.request
urllib.request.urlretrieve(\"http://{GATEWAY}:8000/noise\", \"fetched\")'; do sleep 0.2; done
             kill $!",
            forward(&device, HERE)
        );
        apart(&lab, &fetch).succeed(PATIENCE);
        let fetched = std::fs::read(lab.file("fetched")).unwrap();
        assert!(fetched == noise, "{backend:?} by {command:?}");
        drop((between, served));
    }
}

#[test]
#[ignore = "long: testpmd occupies a core"]
fn network_of_passt_is_reached_by_dpdk_by_trust_proxy_and_shield() {
    require!(
        Need::Guests,
        TESTPMD,
        Need::Program("passt", "passt"),
        Need::Program("ip", "iproute2")
    );
    if !has_passt_vhost_user() {
        return skip_what_is_not_installed("passt has no vhost-user (Debian 13 has one that does)");
    }
    check_foreign(Foreign::Passt);
}

#[test]
#[ignore = "long: two testpmd occupy a core each"]
fn network_of_testpmd_is_reached_by_dpdk_by_trust_proxy_and_shield() {
    require!(Need::Guests, TESTPMD, Need::Program("ip", "iproute2"));
    check_foreign(Foreign::Testpmd);
}
