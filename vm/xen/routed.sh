# Helpers for scenarios with routed interfaces: driver domains with `xl devd` and Xen's script vif-route, without a bridge.
#
# A chain as in Qubes OS: a guest `one`, a firewall domain `fw`, a driver domain `net`, and behind it the network
# namespace `world` in place of what a network card leads to. Each hop routes; a domain has one /32 address.

WORLD=192.0.2.1
NET=192.0.2.2
FW=10.137.0.5
ONE=10.137.0.11

# create_driver_domain NAME [LINE...]: checks that a PVH domain with forwarding, and programs for backends, starts.
create_driver_domain() {
    local name=$1
    shift
    check "$name is created" create_guest $name 'type="pvh"' driver_domain=1 "$@" || { state_of_chain; give_up 'nothing to see'; }
    check "$name takes commands" guest_ready $name || give_up 'nothing to see'
    # libcrc32c needs the module, and asks for it by a name that busybox does not know.
    on $name 'load_modules crc32c_generic; load_modules tun xen-privcmd nft_ct nft_chain_nat nft_masq'
    check "$name has its modules" on $name 'test $(grep -cE "^(tun|xen_privcmd|nft_ct|nft_masq) " /proc/modules) = 4'
    on $name 'mkdir -p /var/log/xen /var/lib/xen /run/xen /run/lock; ln -sfn /run /var/run; ln -sfn /run/lock /var/lock;
        echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv4/conf/default/rp_filter'
}

# create_world: gives the driver domain `net` an eth0, with a network behind it that has a route to the guest.
create_world() {
    on net "load_modules veth; /usr/bin/ip netns add world &&
        /usr/bin/ip link add eth0 type veth peer name eth0 netns world &&
        ip address add $NET/24 dev eth0 && ip link set eth0 up &&
        /usr/bin/ip -n world address add $WORLD/24 dev eth0 && /usr/bin/ip -n world link set eth0 up &&
        /usr/bin/ip -n world route add $ONE via $NET"
}

# load_rules NAME RULES: replaces the rules of a domain's packet filter.
load_rules() {
    on $1 "printf 'flush ruleset; $2' | nft -f -"
}

# masquerade: gives all traffic that leaves `net` its own address.
masquerade() {
    load_rules net 'table ip routed { chain out { type nat hook postrouting priority 100; oifname eth0 masquerade; }; }'
}

# start_backend NAME serve|netback: starts a backend and the toolstack's daemon in a driver domain.
start_backend() {
    case $2 in
        serve) start_serve $1 ;;
        netback) on $1 'load_modules xen-netback' ;;
    esac && on $1 '{ xl -v devd -F >/tmp/devd.log 2>&1 & }; wait_for 5 pidof xl'
}

# start_serve NAME: starts `ringfence serve` in a driver domain, and waits until it answers.
start_serve() {
    on $1 'touch /tmp/serve.toml; ringfence serve --config /tmp/serve.toml >>/tmp/serve.log 2>&1 & echo $! >/tmp/serve.pid'
    on $1 'wait_for 15 ringfence status'
}

# routed_line N DOMAIN ADDRESS: prints the configuration line of a routed interface that DOMAIN serves.
routed_line() {
    printf "vif=['mac=00:16:3e:77:00:%02x,ip=%s,script=vif-route,backend=%s']" $1 $3 $2
}

# start_routed_network NAME ADDRESS GATEWAY: gives eth0 a /32 address, and routes all over the gateway.
start_routed_network() {
    on $1 "wait_for 20 test -e /sys/class/net/eth0 && ip link set eth0 up && ip address add $2/32 dev eth0 &&
        ip route add $3 dev eth0 && ip route add default via $3 && wait_for 20 ping -c 1 -W 1 $3"
}

# in_world COMMAND: prints a command that runs in the network behind the driver domain.
in_world() {
    echo "/usr/bin/ip netns exec world $*"
}

# check_routed_transfer LABEL FROM TO ADDRESS MEBIBYTES [--length]: the same as `check_transfer`, or without the SHA-256;
# `world` is a place as well.
check_routed_transfer() {
    local label=$1 from=$2 to=$3 address=$4 size=$5 receive send expected=$(stream_sum $5)
    PORT=$((${PORT:-5000} + 1))
    [ -z "${6:-}" ] || expected=${expected%% *}
    receive="traffic receive $PORT ${6:-}" send="traffic send $address $PORT $size 2>&1"
    [ $to != world ] || { to=net; receive=$(in_world $receive); }
    [ $from != world ] || { from=net; send=$(in_world $send); }
    on $to "rm -f /tmp/received; { $receive >/tmp/receiving; mv /tmp/receiving /tmp/received; } & usleep 500000"
    send=$(ON_LIMIT=$((20 + size * 2)) on $from "$send") || { not_ok "$label" "$from: $send"; return 1; }
    is "$label" "$(on $to 'wait_for 20 test -e /tmp/received && cat /tmp/received' | tr -d '\r')" "$expected" &&
        note "$label: $size MiB in $send"
}
