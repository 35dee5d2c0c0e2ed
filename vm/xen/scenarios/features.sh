# title: every feature that a guest is offered, off one at a time
# set: all
# machine: xen
# limit: 240

# check_feature_off LABEL KEY VALUE LINE...: checks that traffic flows with these lines under [network] after the
# guest's driver has connected again, and that KEY of the backend has VALUE (`-`: is absent).
check_feature_off() {
    local label=$1 key=$2 value=$3
    shift 3
    check "$label: configured" reload_daemon '[network]' "$@"
    check "$label: connected" on dom0 'rebind_netfront one && configure_network one 11'
    [ $value != - ] || value=
    is "$label: $key" "$(read_key $BACKEND/vif/$(domain_id one)/0/$key)" "$value"
    check_streams one 11 8
}

use_ringfence
create_networked_guest one 11
check_feature_off 'no scatter-gather' feature-sg 0 'offloads = "csum4,csum6"'
check_feature_off 'no TSO over IPv4' feature-gso-tcpv4 0 'offloads = "sg,tso6,csum4,csum6"'
check_feature_off 'no TSO over IPv6' feature-gso-tcpv6 0 'offloads = "sg,tso4,csum4,csum6"'
check_feature_off 'no checksums over IPv4' feature-no-csum-offload 1 'offloads = "sg,csum6"'
check_feature_off 'no checksums over IPv6' feature-ipv6-csum-offload 0 'offloads = "sg,tso4,csum4"'
check_feature_off 'nothing' feature-sg 0 'offloads = "none"'
check_feature_off 'no multicast control' feature-multicast-control 0 'multicast-control = false'
complete_scenario
