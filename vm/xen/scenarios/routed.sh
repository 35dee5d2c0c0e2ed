# title: driver domains with routed interfaces: a firewall domain between a guest and the driver domain, by xl devd
# set: all
# machine: xen-pvh
# limit: 600
# parts: driver-domain

. /vm/xen/routed.sh

# state_of_chain: prints what tells why a hop does not work.
state_of_chain() {
    local each
    for each in net fw; do
        note "$each: $(on $each 'ip address; ip route; ringfence status; dmesg | tail -n 3; tail -n 9 /tmp/serve.log /tmp/devd.log /var/log/xen/xen-hotplug.log' |
            tr -d '\r' | tr '\n' '|')"
    done
}

# has_route NAME ADDRESS: succeeds if a domain has a route to the address over a vif.
has_route() {
    on $1 "ip route | grep -E '^$2 dev vif[0-9]+\.0 '"
}

# has_no_vif NAME: succeeds if a driver domain has no vif.
has_no_vif() {
    on $1 'test -z "$(ls /sys/class/net | grep ^vif)"'
}

# has_no_interface NAME: succeeds if a guest has no eth0.
has_no_interface() {
    on $1 'test ! -e /sys/class/net/eth0'
}

# start_firewall_rules: lets connections from the guest out, but for one port, and those to port 5000 and more in.
start_firewall_rules() {
    load_rules fw "table ip routed { chain through { type filter hook forward priority 0; policy drop;
        ct state established,related accept; iifname \"vif*\" tcp dport 4999 drop; iifname \"vif*\" accept;
        tcp dport 5000-7000 accept; }; }"
}

# connect_firewall: gives `fw` its network, and `net` the way to the guest behind it.
connect_firewall() {
    start_routed_network fw $FW $NET && on net "ip route add $ONE via $FW"
}

# check_chain WHAT SIZE: checks streams over all hops, each way.
check_chain() {
    check "$1: the guest reaches the world" on one "wait_for 20 ping -c 1 -W 2 $WORLD" || state_of_chain
    check_routed_transfer "$1: guest to world" one world $WORLD $2
    check_routed_transfer "$1: world to guest" world one $ONE $2
}

# note_time DOMAIN WHAT FROM TO ADDRESS: checks a stream, and notes the processor time that it takes of the domain.
note_time() {
    local name=$1 before=$(cpu_seconds $1)
    check_routed_transfer "$2" $3 $4 $5 $SIZE --length
    note "$2: $SIZE MiB took $(cpu_used $name $before) s of the processor of $name"
}

# compare_directions BACKEND: notes the time of `net`, and of `fw` that forwards, for streams in both directions.
compare_directions() {
    note_time net "net by $1, in" fw net $NET
    note_time net "net by $1, out" net fw $FW
    note_time fw "net by $1, forwarded from the guest" one world $WORLD
    note_time fw "net by $1, forwarded to the guest" world one $ONE
}

SIZE=${SIZE:-16}
check_not 'dom0 has no backend loaded' grep -E '^xen_(netback|blkback) ' /proc/modules
guests_with tools driver-domain
MEMORY=256
create_driver_domain net
check 'net has a network behind it' create_world
check 'net masquerades' masquerade
check 'net serves, with the daemon of the toolstack' start_backend net serve || state_of_chain
create_driver_domain fw "$(routed_line 5 net $FW)"
check 'fw has its network' connect_firewall || state_of_chain
check 'the script vif-route has made the route' has_route net $FW
check 'fw serves' start_backend fw serve
check 'fw has rules' start_firewall_rules
guests_with
MEMORY=160
check 'the guest is created' create_guest one "$(routed_line 11 fw $ONE)" || give_up 'nothing to see'
check 'it takes commands' guest_ready one || give_up 'nothing to see'
check 'it has its network' start_routed_network one $ONE $FW || state_of_chain
is 'dom0 serves nobody' "$(read_key $BACKEND/vif)" ''
check_chain 'both hops by serve' 16
on net "$(in_world traffic echo 4999) >/dev/null 2>&1 &"
check 'fw reaches a port in the world' on fw "wait_for 5 traffic pulse $WORLD 4999 1"
check_not 'a port that the firewall closes stays closed' on one "timeout 5 traffic pulse $WORLD 4999 1"
on one "ip address add 10.137.0.99/32 dev eth0"
check_not 'packets from another address go nowhere' on one "ping -c 2 -W 2 -I 10.137.0.99 $WORLD"
on net "/usr/bin/ip -n world route delete $ONE"
check 'the world sees the address of net alone' on one "ping -c 2 -W 2 $WORLD"
on net "/usr/bin/ip -n world route add $ONE via $NET"
compare_directions serve

# Detach and attach.
check 'the interface of the guest is detached' xl network-detach one 0
check 'the guest has none' wait_for 20 has_no_interface one
check 'fw has no vif' wait_for 20 has_no_vif fw
check_not 'fw has no route to it' has_route fw $ONE
check 'it is attached again' xl network-attach one mac=00:16:3e:77:00:0b ip=$ONE script=vif-route backend=fw
check 'the guest has its network' start_routed_network one $ONE $FW || state_of_chain
check_chain 'after detach and attach' 4

# The guest is suspended and resumed; driver domains get less memory, and more.
check 'the guest is saved' xl save one /tmp/one.save
check 'it is restored' xl restore /tmp/one.save
check 'it has its console' find_console one
check_chain 'after save and restore' 4
for each in net fw; do check "$each gives memory back" xl mem-set $each 200; done
check_chain 'with less memory' 4
for each in net fw; do check "$each gets it again" xl mem-set $each 256; done

# The daemon is killed, then the domain.
check 'the daemon of fw is killed, and another started' on fw 'kill -9 $(cat /tmp/serve.pid)'
check 'it serves' start_serve fw
check_chain 'after a kill of the daemon' 4
number=$(domain_id net)
for BACKEND_OF_NET in serve netback; do
    check 'the driver domain is killed' xl destroy net
    check 'fw lets go of its interface' xl network-detach fw 0
    check 'nothing is left of the driver domain' wait_for 20 domain_is_gone $number
    guests_with tools driver-domain
    MEMORY=256
    create_driver_domain net
    check 'net has a network behind it again' create_world
    check 'net masquerades' masquerade
    check "net serves by $BACKEND_OF_NET" start_backend net $BACKEND_OF_NET || state_of_chain
    check 'fw has no eth0' wait_for 20 has_no_interface fw
    check 'fw is attached to it' on dom0 'xl network-attach fw mac=00:16:3e:77:00:05 ip=10.137.0.5 script=vif-route backend=net'
    check 'fw has its network' connect_firewall || state_of_chain
    check_chain "the guest lives on, net by $BACKEND_OF_NET" 16
    number=$(domain_id net)
done
compare_directions netback
for each in one fw net; do
    number=$(domain_id $each)
    check "$each is destroyed, and nothing of it is left" xl destroy $each
    check "$each is gone" wait_for 20 domain_is_gone $number
done
complete_scenario
