//! Network cards of `vhost-user net` under DPDK's virtio-user: testpmd is the machine, and answers pings.

use crate::require;
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT, Running};

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
