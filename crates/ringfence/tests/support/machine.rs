//! Virtual machines for tests of `passt`: a namespace whose network card is on the socket (`machine.py`).

use std::os::unix::fs::PermissionsExt;

use super::world::World;

/// Script of the DHCP client.
const ON_LEASE: &str = r#"#!/bin/sh
case $1 in bound|renew) ;; *) exit 0 ;; esac
ip -4 addr flush dev eth0; ip addr add $ip/$mask dev eth0; ip link set eth0 mtu $mtu
if [ -n "$staticroutes" ]; then
    set -- $staticroutes
    while [ $# -gt 1 ]; do
        if [ $2 = 0.0.0.0 ]; then ip route add $1 dev eth0; else ip route add $1 via $2 dev eth0; fi
        shift 2
    done
else
    for router in $router; do ip route add default via $router dev eth0; done
fi
echo "$ip/$mask mtu $mtu router $router dns $dns search $search"
"#;

/// Commands of a machine: configures itself by DHCP.
pub const CONFIGURE_V4: &str = "
    ip link set eth0 up
    busybox udhcpc -i eth0 -n -q -f -s ./on-lease 2>/dev/null
";

/// Commands of a machine: configures itself by DHCP and by router advertisements.
pub const CONFIGURE: &str = "
    echo 0 > /proc/sys/net/ipv6/conf/eth0/accept_dad
    ip link set eth0 up
    busybox udhcpc -i eth0 -n -q -f -s ./on-lease 2>/dev/null
    until ip -6 -o address show dev eth0 scope global | grep -q inet6; do sleep 0.05; done
    until ip -6 route show default | grep -q eth0; do sleep 0.05; done
";

/// Puts the files of a machine into a world.
pub fn prepare(world: &World) {
    std::fs::write(world.file("machine.py"), include_str!("machine.py")).unwrap();
    std::fs::write(world.file("vhost_user.py"), include_str!("vhost_user.py")).unwrap();
    let script = world.file("on-lease");
    std::fs::write(&script, ON_LEASE).unwrap();
    std::fs::set_permissions(script, PermissionsExt::from_mode(0o755)).unwrap();
}
